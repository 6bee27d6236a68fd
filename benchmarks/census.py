"""How fast the census is, and whether its bytes are right.

    python benchmarks/census.py [FILE]

Prints the table, and writes it to FILE.

The floor is what any census has to do: one ``gc.get_objects()`` and one pass over it that looks at each object's type.
The bare pass, which looks at none, stands beside it. The census is what finds, names and sums the tensors; a report is
all of ``oomdoctor.report``, which reads the host's memory and the driver as well; the first row, without any content,
tells what that costs. Each content is made in a process of its own: a million Python objects and 50,000 tensors, where
libraries hold them and where the user's names do. Beside it stands ``MemReporter`` of pytorch_memlab, in the same
process on the same content: collecting alone, against the report, and with its text printed to nowhere, against the
report with its text. Bytes are a share of those of the distinct storages. Times are medians of CPU time, so that other
work on the machine does not show, with the garbage collector off.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import oomdoctor
from oomdoctor.evidence import census, devices
from oomdoctor.objects.named import user_names

OBJECTS, TENSORS, FLOATS, ROUNDS = 1_000_000, 50_000, 256, 5
NODES = (1_000, 10_000, 100_000)


class Record:
    """An object of the user's."""

    def __init__(self, number: int) -> None:
        self.number, self.text = number, str(number)


def mixed(count: int) -> list[Any]:
    """Return objects as programs hold them: tuples, dicts, lists and strings in equal parts, ``count`` in all."""
    return [[(number, str(number)), {"number": number}, [number], str(number)][number % 4] for number in range(count)]


def library(content: Any) -> None:
    """Have an imported module hold ``content``."""
    module = ModuleType("a_library")
    module.__dict__["content"] = content
    sys.modules["a_library"] = module


def tensors() -> list[torch.Tensor]:
    return [torch.ones(FLOATS) for _ in range(TENSORS)]


def nothing() -> dict[str, Any]:
    return {}


def objects_of_libraries() -> dict[str, Any]:
    library(mixed(OBJECTS))
    return {"tensors": tensors()}


def tensors_of_libraries() -> dict[str, Any]:
    library((mixed(OBJECTS), tensors()))
    return {}


def dict_of_lists() -> dict[str, Any]:
    library(mixed(OBJECTS))
    made = tensors()
    return {"table": {f"row {first}": made[first : first + 100] for first in range(0, TENSORS, 100)}}


def parameters() -> dict[str, Any]:
    library(mixed(OBJECTS))
    layers = (nn.Linear(15, 16) for _ in range(TENSORS // 2))
    return {"model": nn.Sequential(*(nn.Sequential(*(next(layers) for _ in range(50))) for _ in range(TENSORS // 100)))}


def tuples() -> dict[str, Any]:
    return {"rows": [(number, str(number)) for number in range(OBJECTS)], "tensors": tensors()}


def dicts() -> dict[str, Any]:
    return {"rows": [{"number": number} for number in range(OBJECTS)], "tensors": tensors()}


def lists() -> dict[str, Any]:
    return {"rows": [[number] for number in range(OBJECTS)], "tensors": tensors()}


def strings() -> dict[str, Any]:
    return {"rows": [str(number) for number in range(OBJECTS)], "tensors": tensors()}


def instances() -> dict[str, Any]:
    return {"rows": [Record(number) for number in range(OBJECTS)], "tensors": tensors()}


def one_dict() -> dict[str, Any]:
    return {"rows": {str(number): (number, None) for number in range(OBJECTS)}, "tensors": tensors()}


def all_kinds() -> dict[str, Any]:
    return {"rows": mixed(OBJECTS), "tensors": tensors()}


CONTENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": nothing,
    "objects in a library, tensors in a list": objects_of_libraries,
    "objects and tensors in a library": tensors_of_libraries,
    "objects in a library, tensors in a dict of lists": dict_of_lists,
    "objects in a library, tensors as parameters": parameters,
    "a list of tuples, a list of tensors": tuples,
    "a list of dicts, a list of tensors": dicts,
    "a list of lists, a list of tensors": lists,
    "a list of strings, a list of tensors": strings,
    "a list of instances, a list of tensors": instances,
    "a dict of tuples, a list of tensors": one_dict,
    "a list of all kinds, a list of tensors": all_kinds,
}


def median_s(do: Callable[[], object]) -> float:
    do()
    times = []
    for _ in range(ROUNDS):
        gc.collect()
        gc.disable()
        began = time.process_time()
        do()
        times.append(time.process_time() - began)
        gc.enable()
    return statistics.median(times)


def bare() -> None:
    for _ in gc.get_objects():
        pass


def floor() -> int:
    types, found = {torch.Tensor, nn.Parameter}, 0
    for value in gc.get_objects():
        if type(value) in types:
            found += 1
    return found


def measure(name: str) -> dict[str, Any]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", FutureWarning)  # memlab asks every object for its class
        return _measure(CONTENTS[name]())


def _measure(namespace: dict[str, Any]) -> dict[str, Any]:
    from pytorch_memlab import MemReporter

    def collect() -> Any:
        reporter = MemReporter()
        reporter.collect_tensor()
        reporter.get_stats()
        return reporter

    def in_print() -> None:
        with redirect_stdout(io.StringIO()):
            MemReporter().report()

    places = [(device.read(), device.holds) for device in devices.in_use()]
    tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, nn.Parameter)]
    nbytes = sum({storage._cdata: storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)}.values())
    del tensors
    return {
        "objects": len(gc.get_objects()),
        "bare": median_s(bare),
        "floor": median_s(floor),
        "census": median_s(lambda: census.take(census.Program(names=list(user_names(namespace))), places)),
        "report": median_s(lambda: oomdoctor.report(namespace)),
        "report_text": median_s(lambda: str(oomdoctor.report(namespace))),
        "memlab": median_s(collect),
        "memlab_text": median_s(in_print),
        "bytes": nbytes,
        "found": oomdoctor.report(namespace).evidence.census.found,
        "memlab_found": sum(row[3] for rows in collect().device_tensor_stat.values() for row in rows),
    }


def measure_graph(nodes: int) -> dict[str, float]:
    """Time a report on chains of a thousand nodes, so many nodes in all, less one on a chain of none.

    Not one chain: torch frees a node that Python has looked at by recursion, so very deep graphs are not followed.
    """
    leaf = torch.ones(FLOATS, requires_grad=True)
    namespace: dict[str, Any] = {"losses": [leaf]}
    idle = median_s(lambda: oomdoctor.report(namespace))
    for _ in range(nodes // 1000):
        loss = leaf
        for _ in range(1000):
            loss = loss.sin()
        namespace["losses"].append(loss)
    took = median_s(lambda: oomdoctor.report(namespace)) - idle
    found = oomdoctor.report(namespace).evidence.census.found
    return {"took": took, "share": found / ((nodes + 1) * leaf.nbytes)}


def alone(do: Callable[..., Any], *args: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(do, args)


def table() -> Iterator[str]:
    yield f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    yield f"{OBJECTS:,} objects, {TENSORS:,} tensors of {FLOATS} float32; medians of {ROUNDS}"
    yield ""
    heads = f"{'':>11}{'bare':>9}{'':>18}{'census':>9}{'census':>9}{'':>9}{'memlab / report':>20}{'bytes found':>19}"
    yield f"{'':<50}{heads}"
    columns = f"{'tracked':>11}{'pass':>9}{'floor':>9}{'census':>9}{'/ floor':>9}{'/ pass':>9}{'report':>9}"
    yield f"{'content':<50}{columns}{'alone':>10}{'in print':>10}{'oomdoctor':>11}{'memlab':>8}"
    for name in CONTENTS:
        row = alone(measure, name)
        times = "".join(f"{1e3 * row[key]:>6.0f} ms" for key in ("bare", "floor", "census"))
        times += (
            f"{row['census'] / row['floor']:>9.2f}{row['census'] / row['bare']:>9.2f}{1e3 * row['report']:>6.0f} ms"
        )
        against = f"{row['memlab'] / row['report']:>9.1f}x{row['memlab_text'] / row['report_text']:>9.1f}x"
        shares = [f"{row[key] / row['bytes']:.1%}" if row["bytes"] else "-" for key in ("found", "memlab_found")]
        yield f"{name:<50}{row['objects']:>11,}{times}{against}{shares[0]:>11}{shares[1]:>8}"
    yield ""
    yield f"{'nodes of the graph':<20}{'took':>10}{'a node':>10}{'found':>8}"
    for nodes in NODES:
        row = alone(measure_graph, nodes)
        each = f"{1e6 * row['took'] / nodes:>7.2f} µs"
        yield f"{nodes:<20,}{1e3 * row['took']:>7.1f} ms{each}{row['share']:>8.1%}"


def main() -> None:
    lines = []
    for line in table():
        print(line, flush=True)
        lines.append(line)
    for path in sys.argv[1:]:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
