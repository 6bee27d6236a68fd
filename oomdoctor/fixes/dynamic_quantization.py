"""Linear layers with weights of 8 bits, for inference on the CPU.

Dynamic quantization keeps the weights of ``nn.Linear`` as int8 with a scale, and rounds what goes into each layer as
it comes. It takes a quarter of the memory of these weights and is most often faster on a CPU, the only place where
its kernels run. The layers are exchanged one by one, so that the float weights go as the others come.

torch has announced that torchao takes this over, and warns so when it is used; where torch no longer has it, nothing is
proposed. There is no live form: weights that were rounded do not come back by themselves.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from oomdoctor.fixes._precision_inference import first_lines, preceded, runs
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.book import Book
from oomdoctor.program.import_lines import knows_torch

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_TRAINS: Final = "the failing cell trains, and weights of 8 bits cannot be trained"


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the one dose: every linear layer of the models that are run."""
    del incident
    code = evidence.code
    if any(loop.in_failing_run for loop in code.loops):
        return Refused(_TRAINS)
    if evidence.device.tensor_device != "cpu" or evidence.device.simulated:
        return Refused("the kernels of dynamic quantization run on the CPU alone")
    if not code.grad_disabled:
        return Refused("the failing line does not run under no_grad or inference_mode, so it may be training")
    if code.half_weights:
        return Refused("the weights take 2 bytes each already, and are quantized from 4")
    linear = sum(model.linear_bytes for model in code.models)
    if not linear:
        return Refused("no model with linear layers was found among the notebook's objects")
    if find_spec("torch.ao.quantization.quantize") is None:
        return Refused("this torch has no dynamic quantization: it has moved to torchao")
    return (
        Proposal(
            dose=Dose.of(dtype="qint8"),
            effect=Effect.CHANGES_RESULT,
            saves=linear * 3 // 4,
            slowdown=1.0,
            basis=f"analytic estimate: 1 byte in place of 4 for each of {format_size(linear)} of linear layers",
            caveat="weights of linear layers, and what goes into them, are rounded to 8 bits, and the weights stay so",
        ),
    )


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the failing cell with its models quantized before they are run."""
    if any(loop.in_failing_run for loop in evidence.code.loops):
        return Refused(_TRAINS)
    if any("quantiz" in cell.source for cell in cells.history):
        return Refused("the cells have to do with quantization already")
    if not knows_torch(cells):
        return Refused("the cells do not import `torch` by its name")
    book = Book.read(cells)
    found = runs(book, evidence.code)
    models = {model.path: model for model in evidence.code.models}
    if not found:
        return Refused("no call of a model of the notebook was found in what the failing cell runs")
    why = next((why for run in found if (why := _why_not(models[run.path])) is not None), None)
    if why is not None:
        return Refused(why)
    call = "torch.ao.quantization.quantize_dynamic({}, {{torch.nn.Linear}}, dtype=torch." + f"{dose['dtype']}, "
    first = first_lines(book, found, lambda path: call.format(path) + "inplace=True)")
    if isinstance(first, Refused):
        return first
    parsed = rewriting.read(cells.failing.source)
    if isinstance(parsed, Refused):
        return parsed
    return rewriting.join(cells, [rewriting.edit(cells, cells.failing, parsed, preceded(parsed, parsed.module, first))])


def _why_not(model: ModelFacts) -> str | None:
    if model.type_name == "Linear":
        return f"`{model.path}` is one layer, which cannot be exchanged in place"
    if not model.linear_bytes:
        return f"`{model.path}` has no linear layers"
    return None


FIX: Final = Fix(
    id="dynamic_quantization",
    title="Quantize the linear layers to 8 bits for inference on the CPU",
    effect=Effect.CHANGES_RESULT,
    cost="results rounded to 8 bits; most often faster on a CPU",
    propose=propose,
    apply=None,
    patch=patch,
)
