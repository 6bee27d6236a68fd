"""Sockets of groups: those that were opened while a group was made are shut down, and no other."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from oomdoctor.errors import OomDoctorError
from oomdoctor.ranks.groups import Groups, Released


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups(1)
    yield made
    made.remove()


def test_only_what_was_opened_while_a_group_was_made_is_shut_down(groups: Groups) -> None:
    before = connected()
    with groups._noting():
        of_group = connected()
    after = connected()
    assert groups.release() == 2  # both ends are of this process
    assert of_group[0].recv(1) == b""
    for ours, theirs in (before, after):
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
    assert groups.release() == 0
    for one in (*before, *of_group, *after):
        one.close()


def test_a_connection_to_the_store_is_left_unless_a_meeting_waits_on_it() -> None:
    ours, theirs = connected()
    groups = Groups(ours.getpeername()[1])
    with groups._noting():
        other = connected()
        of_store = socket.create_server(("127.0.0.1", 0))
    assert groups.release() == 2
    theirs.sendall(b"x")
    assert ours.recv(1) == b"x"
    for one in (ours, theirs, *other, of_store):
        one.close()


def test_a_rank_that_was_released_makes_no_group_before_its_next_run(groups: Groups) -> None:
    groups.watch()
    groups.release()
    with pytest.raises(Released, match="another rank has ended this run"):
        dist.init_process_group("gloo", init_method="env://", rank=0, world_size=1)
    assert not dist.is_initialized()


def test_what_makes_groups_is_put_back() -> None:
    known = (c10d._new_process_group_helper, c10d.rendezvous, c10d.init_process_group, dist.init_process_group)
    groups = Groups(1)
    groups.watch()
    assert sys.modules["torch.distributed"].init_process_group is not known[3]
    groups.remove()
    assert (c10d._new_process_group_helper, c10d.rendezvous, c10d.init_process_group, dist.init_process_group) == known


@pytest.mark.parametrize("where", ["tcp://127.0.0.1:1", "file:///nowhere/else", "env://", "store"])
def test_groups_of_a_further_attempt_meet_over_the_store_of_the_circle(groups: Groups, where: str) -> None:
    """Wherever the program has them meet: none of these would do."""
    met = list[str]()

    def connection(prefix: str) -> Any:
        met.append(prefix)
        return dist.HashStore()

    groups.watch()
    groups.circle = SimpleNamespace(rank=0, world=1, connection=connection)  # type: ignore[assignment]
    groups.begin("run/1")
    how: Any = {"store": dist.HashStore()} if where == "store" else {"init_method": where}
    for _ in range(2):
        dist.init_process_group("gloo", rank=0, world_size=1, **how)
        groups.destroy()
    assert met == ["run/1/2", "run/1/3"]
    assert groups.refused is None


def test_in_a_job_that_has_just_begun_they_meet_where_the_program_says(groups: Groups) -> None:
    groups.watch()
    groups.circle = SimpleNamespace(rank=0, world=1)  # type: ignore[assignment]
    groups.begin("run/0", is_first=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups.destroy()


def test_a_group_of_several_ranks_is_refused_while_one_is_healed_alone(groups: Groups) -> None:
    groups.watch()
    with groups.none_of_several("others would wait"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups.destroy()
        import_module("torch.testing._internal.distributed.fake_pg")
        with pytest.raises(OomDoctorError, match="others would wait"):
            dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    assert not dist.is_initialized()
