"""What the user's code and objects are like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oomdoctor.model.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """One loop that trains, as the AST of the cells shows it.

    Attributes:
        cell: number of the cell that it stands in; ``line``: of the ``for`` or ``while`` within it; ``end_line``: of
            the last line of its body.
        function: the function that it stands in, None at the top level.
        in_failing_run: whether the failing cell runs it (stands in it, or calls its function); ``was_running``: whether
            it was under way when memory ran out, True as well where the lines that ran are not known.
        loader: source text of what is iterated over, without ``enumerate`` and ``tqdm``.
        batch: names bound by the loop target that hold the batch.
        models, optimizers: source text of what is called and stepped.
        loss: name that ``backward`` is called on, None where it is an expression.
        loss_call: source text of the call that made the loss.
        order: ``zero_grad``, ``forward``, ``backward``, ``clip``, ``step``, ``schedule``, as they come.
        accumulates: steps are taken on some iterations only.
        draws: calls in the step that draw random numbers, as source text.
        file: what the module is called that it stands in, None in a cell.
        stands_for: ``(name, path)`` of parameters of the function and the names of the namespace passed for them.
        batch_shape: of the first tensor of the batch that was there, None where no name of the namespace holds it.
    """

    cell: int
    line: int
    function: str | None
    in_failing_run: bool
    loader: str = ""
    batch: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    loss: str | None = None
    loss_call: str | None = None
    order: tuple[str, ...] = ()
    accumulates: bool = False
    draws: tuple[str, ...] = ()
    stands_for: tuple[tuple[str, str], ...] = ()
    end_line: int | None = None
    was_running: bool = True
    batch_shape: tuple[int, ...] | None = None
    file: str | None = None

    @property
    def where(self) -> str:
        """The place in words: ``line 3 of cell 2``, ``line 7 of train.py``."""
        return f"line {self.line} of {self.file or f'cell {self.cell}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A module that a name of the namespace holds.

    Attributes:
        path: the expression for it, ``model``.
        stepped: an optimizer that a name holds steps parameters of it.
        blocks: paths of containers of repeated blocks below it (``encoder.layers``), outermost first.
        segments: parts to run again in the backward pass, paths and stretches ``features[0:3]``, in their order.
        switches: methods by which parts of it recompute their own layers, ``(path, whether it may leave layers out)``.
        batch_norm: modules that couple the samples of a batch in training mode.
        dropout: modules that draw random numbers in training mode with a probability above zero.
        sequence_first: recurrent and attention modules that take the batch in dimension 1.
        any_size: modules that pool images of whatever size to the one that the layers after them take.
        linear_bytes: parameters of ``nn.Linear`` layers.
        convolution_bytes: weights of convolutions wider than a point that are neither grouped nor depthwise;
            ``separable_bytes``: what a depthwise one and one of a point would take in the place of each.
        repeats: blocks of the container of repeated blocks that has most to share, and their ``repeated_bytes``.
        fused_without_grad: modules that in evaluation without gradients compute by another, fused kernel.
        hooked: modules with hooks that are called at each forward, empty text for the model itself.
        leaves: attributes in which a forward has left tensors with their graph, a loss term or features.
        takes_loss: its forward, or that of a part, names a loss.
        scope: of a model that only locals of a function lead to, ``(cell, line)`` of the function.
    """

    path: str
    type_name: str
    training: bool
    parameter_bytes: int
    stepped: bool = False
    blocks: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    switches: tuple[tuple[str, bool], ...] = ()
    batch_norm: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ()
    sequence_first: tuple[str, ...] = ()
    any_size: tuple[str, ...] = ()
    linear_bytes: int = 0
    convolution_bytes: int = 0
    separable_bytes: int = 0
    repeats: int = 0
    repeated_bytes: int = 0
    fused_without_grad: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    takes_loss: bool = False
    scope: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """A loss module that a name of the namespace holds."""

    path: str
    type_name: str
    reduction: str | None
    ignore_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """An optimizer that a name of the namespace holds.

    Attributes:
        path: the expression for it, ``optimizer``.
        home: the module that defines its class, ``torch.optim.adam``.
        parameter_bytes: of the parameters that it steps; ``largest_bytes``: of the largest of them.
        foreach: its step goes through lists of all parameters at once, as it stands.
    """

    path: str
    type_name: str
    home: str
    parameter_bytes: int
    largest_bytes: int
    foreach: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """A ``DataLoader`` that a name of the namespace leads to.

    Attributes:
        path: the expression for it, ``train_loader``.
        prefetch: batches that each worker fetches ahead, None without workers.
        persistent: its workers stay from one epoch to the next.
        spawns: workers begin with an interpreter of their own, not as forks of this process.
        iterable: it reads an ``IterableDataset``, of which each worker reads what it likes.
        unordered: batches come as they are ready.
        varies: why a batch may depend on the process that makes it, None where two workers made the same samples.
        order: why the order may depend on when indices are asked for, None where it is certain that it does not.
        shuffles: random numbers decide on the order.
        collates: torch's own ``default_collate`` copies samples into batches.
    """

    path: str
    num_workers: int
    prefetch: int | None
    pin_memory: bool = False
    persistent: bool = False
    spawns: bool = False
    iterable: bool = False
    unordered: bool = False
    varies: str | None = None
    order: str | None = None
    shuffles: bool = False
    collates: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """A model that ``DistributedDataParallel`` or ``DataParallel`` wraps, as a name of the namespace holds it.

    Attributes:
        path: the expression for the wrapper, ``model``; ``type_name``: which of the two it is.
        ranks: processes that train it together, or devices of ``DataParallel``; None where that is not known.
        dtypes: of its parameters.
        bucket_views: the gradients lie in the buckets that are exchanged.
    """

    path: str
    type_name: str
    ranks: int | None = None
    dtypes: tuple[str, ...] = ()
    bucket_views: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """A trainer of a library whose loop the failure came out of.

    Attributes:
        library: ``transformers`` or ``lightning``.
        phase: what it was doing, ``train`` or ``evaluate``.
        cell, line: where the cells make its settings, None where there is not one such place.
        call: source text of what is called there, ``TrainingArguments``.
        settings: those in force, by their keywords, and ``batch_size`` and ``drop_last`` of a loader that it was given.
        model: the model that it trains; ``optimizer``: what steps it. None where they were not found.
        given_optimizer: the optimizer was made by the user.
        recomputes: the model has a switch to recompute its activations.
        weighs: how it means to add up the gradients of parts of a batch: ``items`` by the labels in each, ``parts`` all
            alike.
        draws: what draws random numbers for each part of a batch, or may, beside layers of the model.
        gathered_bytes: predictions that it has gathered.
    """

    library: str
    phase: str
    cell: int | None = None
    line: int | None = None
    call: str = ""
    settings: tuple[tuple[str, int | float | str | bool | None], ...] = ()
    model: ModelFacts | None = None
    optimizer: OptimizerFacts | None = None
    given_optimizer: bool = False
    recomputes: bool = False
    weighs: str
    draws: str | None = None
    gathered_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFacts:
    """What the cells and the objects of the namespace show, with nothing of the user's run.

    Facts that are text say where and what, ``In[3] line 7: torch.compile(model)``, and are None where no
    cell does it.

    Attributes:
        local_models: models that only locals of the functions lead to that were running.
        steppers: what the optimizers of ``optimizers`` are like; ``local_steppers``: those that only locals lead to.
        not_repeatable: calls of the failing run that cannot be undone and may have been made, ``line: call``;
            ``not_reached``: those that it had not come to when it failed; ``written_anew``: calls that write a file as
            a whole, which a second run does as well.
        grad_disabled: the failing line ran under ``no_grad`` or ``inference_mode``.
        runs_model: whether the failing cell calls a model, by itself or by functions of the cells; None where it was
            not looked for.
        hooks: where a hook is registered that keeps what passes through it.
        classes: how many classes models may predict: outputs of last linear layers, and rows of embeddings as wide.
        generates: a call of ``generate``.
        numpy_call: the call of NumPy in the failing line, its text alone; ``pandas_call``: that of pandas.
        batch_sizes: ``(path, samples in a batch)`` of each loader that puts its batches together itself.
        num_workers: worker processes of a loader, the most; None where no loader is known. ``prefetch``: batches that
            each of them fetches ahead.
        pin_memory: batches pass through page-locked memory.
        loaders: what the loaders of ``batch_sizes`` and all others are like.
        sharing_strategy: by what torch hands tensors between processes, ``file_descriptor``; None where it does not.
        sequence_varies: batches are padded to the longest of their samples.
        autocast: some mixed precision is in force; ``half_weights``: most weights take 2 bytes each.
        native_bfloat16: the CUDA device computes in bfloat16 itself; None where no CUDA device is in use.
        float32_only: classes of layers that this processor computes in float32 and not in bfloat16, ``LSTM``.
        apex: a call of apex's mixed precision.
        data_parallel: a call of ``nn.DataParallel``.
        distributed: ``DistributedDataParallel``, ``FullyShardedDataParallel`` or ``deepspeed``.
        find_unused_parameters: DDP looks for parameters without a gradient in each step.
        world_size: processes of the default process group, None where this process is in none.
        replicas: what the wrappers are like that spread a model over processes or devices.
        compiles: a call of ``torch.compile``; ``cuda_graphs``: of what captures a CUDA graph.
        framework: other libraries in this process that take memory of the device, ``tensorflow, jax``.
        reruns: how often the source of the failing cell was run before.
        grows: names of the failing cell that hold more with each round of a loop, with the line that makes them.
        trainers: the trainers of libraries that the failure came out of.
        sites: where the practices stand that fixes mend, by the id of the fix.
    """

    failing_cell: int | None = None
    loops: tuple[TrainingLoop, ...] = ()
    models: tuple[ModelFacts, ...] = ()
    local_models: tuple[ModelFacts, ...] = ()
    losses: tuple[LossFacts, ...] = ()
    optimizers: tuple[tuple[str, str], ...] = ()
    steppers: tuple[OptimizerFacts, ...] = ()
    local_steppers: tuple[OptimizerFacts, ...] = ()
    runs_model: bool | None = None
    not_repeatable: tuple[str, ...] = ()
    not_reached: tuple[str, ...] = ()
    written_anew: tuple[str, ...] = ()
    grad_disabled: bool = False
    hooks: str | None = None
    classes: tuple[int, ...] = ()
    generates: str | None = None
    numpy_call: str | None = None
    pandas_call: str | None = None
    batch_sizes: tuple[tuple[str, int], ...] = ()
    num_workers: int | None = None
    prefetch: int | None = None
    pin_memory: bool = False
    loaders: tuple[LoaderFacts, ...] = ()
    sharing_strategy: str | None = None
    sequence_varies: bool = False
    autocast: bool = False
    half_weights: bool = False
    native_bfloat16: bool | None = None
    float32_only: tuple[str, ...] = ()
    apex: str | None = None
    data_parallel: str | None = None
    distributed: str | None = None
    find_unused_parameters: bool = False
    world_size: int | None = None
    replicas: tuple[ReplicaFacts, ...] = ()
    compiles: str | None = None
    cuda_graphs: str | None = None
    framework: str | None = None
    reruns: int = 0
    grows: tuple[tuple[str, str], ...] = ()
    trainers: tuple[TrainerFacts, ...] = ()
    sites: Mapping[str, tuple[Site, ...]] = field(default_factory=dict)

    def first(self, fix: str) -> Site | None:
        """Return the first site of what the fix of this id mends, None where there is none."""
        return next(iter(self.sites.get(fix, ())), None)
