"""The process groups that a program makes, and how a rank gets itself out of a collective.

For gloo, nothing but the end of its connections ends a collective that waits for another rank: to destroy or abort the
group frees nobody while DDP's reducer holds it. So the sockets that were opened while a group was made are noted, and
shut down. Of a group that was made before, they are those that lead from one rank to another: each tells the others
the ends of its own. The communicators of NCCL are aborted. A rank frees itself alone; the others do the same.

Groups of a further attempt meet under keys of their own in the store that the ranks talk over, wherever the program has
them meet: those of the first would still be found there, with the addresses of connections that are gone.

Limits: groups of MPI and UCC cannot be made anew like this. Where a group was made before, whatever else the ranks have
connected to each other for is shut down as well.
"""

from __future__ import annotations

import gc
import inspect
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import OomDoctorError
from oomdoctor.objects.alive import alive
from oomdoctor.objects.named import is_users_file

if TYPE_CHECKING:
    from oomdoctor.ranks.circle import Circle

C10D: Final = "torch.distributed.distributed_c10d"
_MENDED: Final = frozenset({"gloo", "nccl", "undefined", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "fake"})
"""Backends whose groups can be freed and made anew."""


_KINDS: Final = frozenset({"cpu", "cuda", "gloo", "nccl", "undefined", "fake"})
"""Devices and backends in the configuration of such a group."""
_ENDS: Final = "ends"


class Released(RuntimeError):
    """No group is made any more in a run that another rank has ended: nobody would come to meet this one."""


class Groups:
    """The process groups of this rank.

    Args:
        port: of the job's store, whose connections are nobody's group.

    Attributes:
        made: called when the group of all ranks was made.
        port: of the job's store.
        circle: over whose store groups of a further attempt meet, None as long as there is none.
        meetings: how often the group of all ranks was made.
        has_parts: whether there are groups of some ranks beside that of all.
        is_librarys: whether a library has made the group of all ranks, which may remember that it has.
        is_released: whether this rank was released, so that it makes no group before the next run.
        refused: why groups cannot be made anew, None where they can.
    """

    def __init__(self, port: int, made: Callable[[], object] = lambda: None) -> None:
        self.port, self.refused, self.has_parts = port, None, False
        self.circle: Circle | None = None
        self.meetings, self._alone = 0, ""
        self.is_released = self.is_librarys = self._adopted = False
        self.made, self._prefix, self._met = made, "", 0
        self._given: dict[str, Any] = {}
        self._initialise: Any = None
        self._sockets: dict[int, int] = {}
        self._meeting: dict[int, int] | None = None
        self._lock = threading.Lock()
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    refused: str | None

    def watch(self) -> None:
        """Note the sockets of every group from now on. Loads ``torch.distributed``."""
        import torch.distributed.distributed_c10d as loaded

        c10d: Any = loaded
        if not hasattr(c10d, "_new_process_group_helper") or self._replaced:
            return
        made, met = c10d._new_process_group_helper, c10d.rendezvous

        def noted(*args: Any, **kwargs: Any) -> Any:
            backend = str(args[3] if len(args) > 3 else kwargs.get("backend", ""))
            if backend not in _MENDED:
                self.refused = f"a group of the backend {backend} cannot be made anew"
            self.has_parts = self.has_parts or bool(len(args) > 2 and args[2])
            with self._noting():
                return made(*args, **kwargs)

        def keyed(url: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
            with self._noting():
                again = self._again(rank, world_size)
                meeting = again or next(iter(met(url, rank, world_size, **kwargs)))
            yield meeting

        initialise = c10d.init_process_group

        def initialised(*args: Any, **kwargs: Any) -> Any:
            if c10d._new_process_group_helper is not noted:  # no more, or in a copy of the process
                return initialise(*args, **kwargs)
            self.is_librarys = not is_users_file(sys._getframe(1).f_code.co_filename)
            given = self._given = dict(inspect.signature(initialise).bind(*args, **kwargs).arguments)
            own = given.get("rank", -1), given.get("world_size", -1)
            if given.get("store") is not None and (again := self._again(*own)) is not None:
                given["store"], given["rank"], given["world_size"] = again
            found = initialise(**given)
            self._has_met(c10d)
            return found

        noted.__wrapped__, noted.noted_for = made, self  # type: ignore[attr-defined]
        self._initialise = initialise
        for owner, name, new in ((c10d, "_new_process_group_helper", noted), (c10d, "rendezvous", keyed)):
            self._replace(owner, name, new)
        for owner in (c10d, sys.modules["torch.distributed"]):
            self._replace(owner, "init_process_group", initialised)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name), new))
        setattr(owner, name, new)

    def begin(self, prefix: str, *, is_first: bool = False) -> None:
        """Begin a run, whose groups meet below ``prefix``; the first of a job where the program has them meet."""
        self._prefix, self.is_released = prefix, False
        self._met = 0 if is_first and not self.meetings else 1

    def _again(self, rank: int = -1, world: int = -1) -> tuple[Any, int, int] | None:
        """Return over what the ranks meet, and this rank among how many; None where the program has them meet.

        That is the first time, and for a group of other ranks than those of the circle.
        """
        circle = self.circle
        if circle is not None and (world if world >= 0 else _world_of_environment(circle.world)) != circle.world:
            return None
        self._met += 1
        if circle is None or self._met == 1:
            return None
        with self._noting():
            store = circle.connection(f"{self._prefix}/{self._met}")
        return store, rank if rank >= 0 else circle.rank, circle.world

    def _has_met(self, c10d: Any) -> None:
        self.meetings += 1
        if self._alone and c10d.get_world_size() > 1:
            c10d.destroy_process_group()
            raise OomDoctorError(self._alone)
        self.made()

    @contextmanager
    def none_of_several(self, why: str) -> Iterator[None]:
        """Refuse to make a group of several ranks, and say why, while the body runs."""
        self._alone = why
        try:
            yield
        finally:
            self._alone = ""

    @staticmethod
    def are_watched() -> bool:
        """Whether the groups of this process are noted already."""
        return hasattr(getattr(sys.modules.get(C10D), "_new_process_group_helper", None), "noted_for")

    def remove(self) -> None:
        """Put back what makes groups; a wrapper of somebody else's stays."""
        while self._replaced:
            owner, name, old, new = self._replaced.pop()
            if getattr(owner, name) is new:
                setattr(owner, name, old)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        if self.is_released:
            raise Released("another rank has ended this run")
        outer, before = self._meeting, _sockets()
        self._meeting = before if outer is None else outer
        try:
            yield
        finally:
            self._meeting = outer
            self._sockets |= {inode: at for inode, at in _sockets().items() if inode not in before}

    def release(self) -> int:
        """End whatever collective this rank is in; return how many connections were shut down.

        To be called by a thread beside the program. It may be called again.
        """
        with self._lock:
            self.is_released = True
            found, meeting = _sockets(), self._meeting
            known = self._sockets | self._between_ranks(found)
            if meeting is not None:  # it waits for the others to meet, by the store
                known |= {inode: at for inode, at in found.items() if inode not in meeting}
            self._sockets.clear()
            self._adopted = False  # those of a further attempt are noted
            # Connections first: to abort may wait.
            count = sum(
                _shut_down(found[inode], self.port, is_meeting=meeting is not None and inode not in meeting)
                for inode in known
                if inode in found
            )
            for backend in _aborting():
                with suppress(RuntimeError):  # it was aborted already
                    backend.abort()
            return count

    @property
    def is_known(self) -> bool:
        """Whether the sockets of a group were seen as they were opened."""
        return bool(self._sockets)

    def adopt(self, circle: Circle) -> None:
        """Take over the groups that were made before any was noted, by whatever has made them."""
        c10d: Any = sys.modules[C10D]
        group = c10d._get_default_group()
        given = str(c10d.get_backend_config(group))
        self._given = {"backend": given}
        for device in group._device_types:
            with suppress(AttributeError, RuntimeError):  # options of another kind, or a device that has no backend
                self._given["timeout"] = group._get_backend(device).options._timeout
        for backend in sorted(set(given.replace(",", ":").split(":")) - _KINDS):
            self.refused = f"a group of the backend {backend} cannot be made anew"
        self.has_parts, self.is_librarys, self.meetings = len(c10d._world.pg_map) > 1, True, 1
        circle.publish(_ENDS, [ends for number in _sockets().values() if (ends := _ends(number)) is not None])
        self._adopted = True

    def _between_ranks(self, found: dict[int, int]) -> dict[int, int]:
        """Return those of some sockets that lead to another rank, where the groups were taken over."""
        if self.circle is None or not self._adopted:
            return {}
        theirs = {(there, here) for told in self.circle.published(_ENDS) for here, there in told}
        return {inode: number for inode, number in found.items() if _ends(number) in theirs}

    def sequence(self) -> int:
        """Return how many collectives this rank has taken part in, for the groups that there are."""
        c10d: Any = sys.modules.get(C10D)
        count = 0
        for group in list(c10d._world.pg_names) if c10d is not None else ():
            with suppress(RuntimeError):  # a backend that does not count them
                count += int(group._get_sequence_number_for_group())
        return count

    def renew(self, *, rewraps: bool = True) -> None:
        """Make the group of all ranks anew, as the program has made it. All ranks have to do so at the same time.

        Args:
            rewraps: whether models that DDP wraps are to use it; the wrappers stay the same objects.
        """
        from torch.nn.parallel import DistributedDataParallel

        c10d: Any = sys.modules[C10D]
        wrapped = alive(DistributedDataParallel) if rewraps else ()
        wrappers = [(one, one.module, _settings(one), dict(vars(one))) for one in wrapped]
        for wrapper, *_ in wrappers:
            for name in ("reducer", "logger", "process_group"):
                vars(wrapper).pop(name, None)
        self.destroy()
        gc.collect()
        again = self._again()
        if again is None:
            raise OomDoctorError("the ranks have no place to meet again")
        met = dict(zip(("store", "rank", "world_size"), again, strict=True))
        self._initialise(**{**self._given, **met, "init_method": None})
        for wrapper, module, settings, before in wrappers:
            vars(wrapper).clear()
            DistributedDataParallel.__init__(wrapper, module, **settings)
            now, hooks = vars(wrapper), before.get("_comm_hooks", ())
            kept = {name for name in before if name not in now or "_hooks" in name} | {"training"}
            now |= {name: before[name] for name in kept - {"_comm_hooks"}}
            for hook, state in hooks:
                if any(
                    isinstance(value, c10d.ProcessGroup) for value in (state, *getattr(state, "__dict__", {}).values())
                ):
                    raise OomDoctorError("a communication hook of DDP's holds a group, which cannot be made anew in it")
                wrapper.register_comm_hook(state, hook)

    def destroy(self) -> None:
        """Have torch forget all groups, so that the program can make them anew."""
        c10d: Any = sys.modules.get(C10D)
        if c10d is None or not c10d.is_initialized():
            return
        # That of the program's end, which a further attempt sets again around itself.
        hook = sys.excepthook
        try:
            c10d.destroy_process_group()
        finally:
            if getattr(hook, "__name__", "") == "_distributed_excepthook":
                inner = [cell.cell_contents for cell in hook.__closure__ or ()]
                sys.excepthook = next((one for one in inner if callable(one)), sys.__excepthook__)


def _world_of_environment(otherwise: int) -> int:
    """Return how many ranks a launcher has told of, where a program names no number."""
    told = os.environ.get("WORLD_SIZE", "")
    return int(told) if told.isdigit() else otherwise


def _settings(wrapper: Any) -> dict[str, Any]:
    """Return what ``DistributedDataParallel`` was made with. Source: its ``__init__`` in torch 2.4 to 2.13."""
    names = ("device_ids", "output_device", "dim", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    settings: dict[str, Any] = {name: getattr(wrapper, name) for name in names}
    if not wrapper.broadcast_buffers:  # to name it is deprecated since torch 2.13
        settings["broadcast_buffers"] = False
    size = wrapper.bucket_bytes_cap / 2**20
    return settings if getattr(wrapper, "bucket_bytes_cap_default", size == 25) else settings | {"bucket_cap_mb": size}


def _sockets() -> dict[int, int]:
    """Return the descriptor of each socket of this process by its inode, which no other socket has."""
    found = {}
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError, ValueError):  # that of the listing itself is closed
            told = os.fstat(number := int(path.name))
            if stat.S_ISSOCK(told.st_mode):
                found[told.st_ino] = number
    return found


@contextmanager
def _connection(number: int) -> Iterator[tuple[socket.socket, Any, Any]]:
    """Give a connection by TCP of this process, with its names here and there.

    Raises:
        OSError: it was closed meanwhile, listens, waits to be connected, or is none by TCP.
    """
    with socket.socket(fileno=os.dup(number)) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError
        yield own, own.getsockname(), own.getpeername()


def _shut_down(number: int, port: int, *, is_meeting: bool) -> bool:
    """Shut a connection by TCP down, unless it is one to the job's store that no meeting waits on."""
    with suppress(OSError), _connection(number) as (own, here, there):
        if here[1] == port or (there[1] == port and not is_meeting):
            return False
        own.shutdown(socket.SHUT_RDWR)
        return True
    return False


def _ends(number: int) -> tuple[str, str] | None:
    """Return the address of a connection by TCP here and there; None where it is none."""
    with suppress(OSError), _connection(number) as (_, here, there):
        return _address(here), _address(there)
    return None


def _address(name: tuple[Any, ...]) -> str:
    """Return host and port as they are told on both sides, whether as of IPv4 or within IPv6."""
    return f"{name[0].removeprefix('::ffff:')} {name[1]}"


def _aborting() -> Iterator[Any]:
    """Yield the backends whose collectives end when they are aborted: those of devices."""
    c10d: Any = sys.modules.get(C10D)
    torch: Any = sys.modules.get("torch")
    if c10d is None or torch is None or not c10d.is_nccl_available():
        return
    for group in list(c10d._world.pg_names):
        with suppress(RuntimeError):  # it has no backend for CUDA
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, c10d.ProcessGroupNCCL):
                yield backend
