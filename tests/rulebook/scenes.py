"""What a failure's evidence looks like, each with the rule that must come first."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from observed import site

from oomdoctor.model.case import Cause
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import Census, DeviceMemory, DeviceProcess, Holding, HostMemory, PrivatePool, Role
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable

NONE = Unavailable("not read here")


def evidence(*, roles=(), holdings=(), code=None, device=None, host=None, others=()):
    memory = {"total": 8 * GIB, "free": GIB, "allocated": 6 * GIB, "reserved": 7 * GIB} | (device or {})
    machine = {one.name: NONE for one in fields(HostMemory)} | (host or {})
    return Evidence(
        devices=tuple(DeviceMemory(name=name, tensor_device=name, **memory) for name in ("cuda:0", *others)),
        host=HostMemory(**machine),
        censuses=(
            Census(
                device="cuda:0",
                found=sum(size for _, size in roles),
                allocated=memory["allocated"],
                roles=tuple(roles),
                holdings=tuple(holdings),
            ),
            *(Census(device=name, found=0, allocated=0) for name in others),
        ),
        code=code or CodeFacts(),
    )


CUDA = Incident(is_oom=True, family=Family.CUDA, device="cuda:0", requested=64 * MIB, total=8 * GIB, free=32 * MIB)
LOOP = TrainingLoop(
    cell=3,
    line=1,
    function=None,
    in_failing_run=True,
    loader="loader",
    batch=("x", "y"),
    models=("model",),
    optimizers=("optimizer",),
    loss="loss",
    loss_call="criterion(model(x), y)",
    order=("zero_grad", "forward", "backward", "step"),
)
TRAINING = CodeFacts(loops=(LOOP,), optimizers=(("optimizer", "AdamW"),))


def held(role, size, path="x", shape=None, dtype="float32"):
    return Holding(bytes=size, device="cuda:0", role=role, path=path, shape=shape, dtype=dtype)


def training(**more):
    return replace(TRAINING, **more)


@dataclass(frozen=True)
class Scene:
    """What was found, and the rule that must come first."""

    first: str
    cause: Cause
    roles: tuple = ()
    holdings: tuple = ()
    code: CodeFacts = TRAINING
    device: dict = field(default_factory=dict)
    host: dict = field(default_factory=dict)
    incident: Incident = CUDA
    silent: tuple = ()
    others: tuple = ()


MODEL_STATE = ((Role.PARAMETER, GIB), (Role.GRADIENT, GIB), (Role.OPTIMIZER_STATE, 2 * GIB))
OTHER = DeviceProcess(pid=4711, bytes=3 * GIB, name="python")
EVALUATED = CodeFacts(sites={"no_grad_eval": (site("In[5] line 3: scores = model(x)"),)})
SCENES = (
    Scene(
        "forward_never_differentiated",
        Cause.BATCH_OR_ACTIVATION,
        ((Role.ACTIVATION, 5 * GIB), (Role.PARAMETER, GIB)),
        (held(Role.ACTIVATION, 4 * GIB, "local `x` of forward → graph"),),
        EVALUATED,
    ),
    Scene(
        "intermediates_dominate",
        Cause.BATCH_OR_ACTIVATION,
        ((Role.ACTIVATION, 5 * GIB), (Role.PARAMETER, GIB)),
        (held(Role.ACTIVATION, 4 * GIB, "local `x` of forward"),),
        replace(EVALUATED, grad_disabled=True),
        silent=("activations_dominate", "forward_never_differentiated", "evaluation_with_gradients"),
    ),
    Scene(
        "garbage_in_cycles",
        Cause.LEAK_OR_PINNED_GRAPH,
        ((Role.ACTIVATION, 5 * GIB), (Role.PARAMETER, GIB)),
        (replace(held(Role.ACTIVATION, 4 * GIB, "(no name leads here)"), count=8, expression=None),),
        silent=("activations_dominate", "intermediates_dominate"),
    ),
    Scene(
        "closure_holds_tensors",
        Cause.LEAK_OR_PINNED_GRAPH,
        ((Role.GRAPH_KEPT_ALIVE, 4 * GIB), (Role.PARAMETER, GIB)),
        (held(Role.GRAPH_KEPT_ALIVE, 4 * GIB, "callbacks[0] → loss → graph"),),
        training(sites={"detach_history": (site("In[3] line 7: callbacks.append(later(loss))"),)}),
    ),
    Scene(
        "request_exceeds_all_held",
        Cause.SINGLE_HUGE_TENSOR,
        ((Role.PARAMETER, 3 * GIB),),
        (replace(held(Role.PARAMETER, 3 * GIB, "model.weight"), expression="model.weight"),),
        CodeFacts(),
        {"allocated": 3 * GIB, "reserved": 3 * GIB, "free": 4 * GIB},
        incident=replace(CUDA, requested=4 * GIB),
        silent=("parameters_dominate", "holder_not_found"),
    ),
    Scene(
        "model_built_beside_old",
        Cause.LEAK_OR_PINNED_GRAPH,
        ((Role.PARAMETER, 5 * GIB),),
        code=CodeFacts(sites={"free_stale": (site("In[1] line 1: model = Net()", "rebound", "model"),)}),
        incident=replace(CUDA, framework_frame="torch/nn/modules/linear.py:109 __init__"),
        silent=("model_does_not_fit_while_built",),
    ),
    Scene("activations_dominate", Cause.BATCH_OR_ACTIVATION, ((Role.ACTIVATION, 5 * GIB), (Role.PARAMETER, GIB))),
    Scene(
        "eager_attention",
        Cause.QUADRATIC_ATTENTION,
        ((Role.ACTIVATION, 5 * GIB),),
        code=training(sites={"sdpa_attention": (site("In[2] line 8: (q @ k.mT).softmax(-1)"),)}),
    ),
    Scene(
        "attention_scores_saved",
        Cause.QUADRATIC_ATTENTION,
        ((Role.ACTIVATION, 5 * GIB),),
        (held(Role.ACTIVATION, 2 * GIB, "loss → graph", (8, 8, 2896, 2896)),),
    ),
    Scene(
        "logits_of_large_vocabulary",
        Cause.BATCH_OR_ACTIVATION,
        ((Role.ACTIVATION, 5 * GIB),),
        (held(Role.ACTIVATION, 2 * GIB, "loss → graph", (8, 512, 128_000)),),
    ),
    Scene(
        "later_batch_longer",
        Cause.BATCH_OR_ACTIVATION,
        (*MODEL_STATE, (Role.ACTIVATION, 4 * GIB)),
        code=training(sequence_varies=True),
    ),
    Scene(
        "batch_itself_large",
        Cause.BATCH_OR_ACTIVATION,
        ((Role.BATCH, 3 * GIB), (Role.ACTIVATION, 2 * GIB)),
        (held(Role.BATCH, 3 * GIB, "images"),),
    ),
    Scene(
        "predictions_gathered",
        Cause.LEAK_OR_PINNED_GRAPH,
        ((Role.USER_TENSOR, 4 * GIB), (Role.PARAMETER, GIB)),
        (held(Role.USER_TENSOR, 4 * GIB, "preds"),),
        CodeFacts(sites={"offload_predictions": (site("In[5] line 4: preds.append(out)"),)}, grad_disabled=True),
        silent=("user_tensors_fill", "one_tensor_holds_most"),
    ),
    Scene(
        "data_set_on_device",
        Cause.SINGLE_HUGE_TENSOR,
        ((Role.USER_TENSOR, 5 * GIB),),
        (held(Role.USER_TENSOR, 5 * GIB, "x_train"),),
        training(sites={"batch_to_device": (site("In[1] line 2: x_train = x_train.cuda()"),)}),
        silent=("user_tensors_fill", "one_tensor_holds_most"),
    ),
    Scene(
        "checkpoint_loaded_on_device",
        Cause.LEAK_OR_PINNED_GRAPH,
        ((Role.USER_TENSOR, 3 * GIB), (Role.PARAMETER, GIB)),
        (held(Role.USER_TENSOR, 3 * GIB, "checkpoint['optimizer']"),),
        training(sites={"load_mmap": (site("In[2] line 4: torch.load(path)"),)}),
    ),
    Scene(
        "one_tensor_holds_most",
        Cause.SINGLE_HUGE_TENSOR,
        ((Role.USER_TENSOR, 5 * GIB),),
        (held(Role.USER_TENSOR, 5 * GIB, "distances", (36_000, 36_000)),),
        CodeFacts(),
        silent=("user_tensors_fill",),
    ),
    Scene(
        "kv_cache_grows",
        Cause.BATCH_OR_ACTIVATION,
        ((Role.KV_CACHE, 3 * GIB), (Role.PARAMETER, 3 * GIB)),
        (held(Role.KV_CACHE, 3 * GIB, "past_key_values"),),
        CodeFacts(grad_disabled=True),
    ),
    Scene("parameters_dominate", Cause.MODEL_TOO_LARGE, ((Role.PARAMETER, 5 * GIB),), code=CodeFacts()),
    Scene("several_roles_share", Cause.BATCH_OR_ACTIVATION, (*MODEL_STATE, (Role.ACTIVATION, 2 * GIB))),
    Scene(
        "training_state_fills",
        Cause.MODEL_TOO_LARGE,
        ((Role.PARAMETER, 2 * GIB), (Role.GRADIENT, 2 * GIB), (Role.OPTIMIZER_STATE, GIB), (Role.ACTIVATION, GIB)),
    ),
    Scene(
        "state_dominates",
        Cause.OPTIMIZER_STATE,
        ((Role.PARAMETER, GIB), (Role.GRADIENT, GIB), (Role.OPTIMIZER_STATE, 3 * GIB), (Role.ACTIVATION, GIB // 2)),
    ),
    Scene(
        "first_step_state",
        Cause.OPTIMIZER_STATE,
        ((Role.PARAMETER, 2 * GIB), (Role.GRADIENT, 2 * GIB), (Role.OPTIMIZER_STATE, GIB)),
        incident=replace(CUDA, framework_frame="torch/optim/adam.py:180 _init_group"),
        silent=("step_temporaries",),
    ),
    Scene(
        "step_temporaries",
        Cause.OPTIMIZER_STATE,
        (*MODEL_STATE, (Role.ACTIVATION, GIB)),
        incident=replace(CUDA, framework_frame="torch/optim/adam.py:700 _multi_tensor_adam"),
        silent=("first_step_state",),
    ),
    Scene(
        "second_notebook",
        Cause.OTHER_PROCESS,
        ((Role.ACTIVATION, GIB),),
        device={"allocated": GIB, "reserved": GIB, "elsewhere": 3 * GIB, "processes": (OTHER,)},
        silent=("other_process", "held_by_no_process"),
    ),
    Scene(
        "held_by_no_process",
        Cause.OTHER_PROCESS,
        ((Role.PARAMETER, GIB // 8),),
        device={"allocated": 3 * GIB, "reserved": 3 * GIB, "elsewhere": 3 * GIB, "processes": ()},
        silent=("other_process", "second_notebook"),
    ),
    Scene(
        "memory_cap_reached",
        Cause.MEMORY_CAP,
        ((Role.ACTIVATION, 3 * GIB),),
        device={"allocated": 3 * GIB, "reserved": 4 * GIB - MIB, "cap": 4 * GIB, "free": 3 * GIB},
    ),
    Scene(
        "jax_preallocates",
        Cause.CUDA_CONTEXT,
        ((Role.ACTIVATION, GIB),),
        code=training(framework="jax"),
        device={"allocated": GIB, "reserved": GIB, "context": 6 * GIB, "elsewhere": 0, "processes": ()},
        silent=("context_takes_much", "other_process"),
    ),
    Scene(
        "first_device_gathers",
        Cause.BATCH_OR_ACTIVATION,
        ((Role.ACTIVATION, 5 * GIB),),
        code=training(data_parallel="In[2] line 3: nn.DataParallel(model)"),
        others=("cuda:1",),
    ),
    Scene(
        "private_pools_reserve",
        Cause.FRAGMENTATION,
        ((Role.PARAMETER, 2 * GIB), (Role.USER_TENSOR, 2 * GIB)),
        device={
            "inactive_split": 512 * MIB,
            "private_pools": (PrivatePool(name="(0, 1)", reserved=GIB, allocated=GIB // 2),),
        },
        code=CodeFacts(cuda_graphs="In[4] line 1: torch.cuda.graph(g)"),
        silent=("fragmentation",),
    ),
)


def of(scene):
    return evidence(
        roles=scene.roles,
        holdings=scene.holdings,
        code=scene.code,
        device=scene.device,
        host=scene.host,
        others=scene.others,
    )
