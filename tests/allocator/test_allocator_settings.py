"""What PYTORCH_CUDA_ALLOC_CONF says, read as torch itself reads it."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.errors import UsageError
from oomdoctor.model.sizes import GIB, KIB, MIB

C10 = Path(torch.__file__).parent / "lib" / "libc10.so"
DIVISIONS_OF = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
SET = getattr(torch._C, "_accelerator_setAllocatorSettings", None)


@pytest.fixture(scope="module")
def torchs_reader():
    """Return torch's own reader of the settings, and put back what it had read."""
    if SET is None:
        pytest.skip(f"torch {torch.__version__} does not offer its reader to Python")
    before = torch._C._accelerator_getAllocatorSettings()
    yield SET
    SET(f"large_segment_size_mb:20,{before}")
    SET(before)


@pytest.fixture(scope="module")
def torchs_divisions(torchs_reader):
    """Return the function of libc10 that tells the divisions for a size."""
    function = getattr(ctypes.CDLL(str(C10)), DIVISIONS_OF, None) if C10.is_file() else None
    if function is None:
        pytest.skip("libc10 does not export the function that tells the divisions")
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_size_t
    return lambda text, size: (torchs_reader(text), function(size))[1]


def test_an_empty_text_is_the_defaults():
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert str(AllocatorSettings()) == "defaults"


def test_all_options_at_once():
    read = AllocatorSettings.parse(
        " expandable_segments:True, max_split_size_mb : 128,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],large_segment_size_mb:32,max_non_split_rounding_mb:64,"
        "per_process_memory_fraction:0.5,backend:native,pinned_use_background_threads:True,"
    )
    assert read == AllocatorSettings(
        expandable_segments=True,
        max_split_size=128 * MIB,
        roundup_power2_divisions=(1,) * 9 + (2, 4) + (8,) * 5,
        large_segment_size=32 * MIB,
        max_non_split_rounding_size=64 * MIB,
        per_process_memory_fraction=0.5,
    )
    assert str(read).startswith("expandable_segments True, max_split_size 134217728")


def test_of_an_option_told_twice_the_last_counts():
    assert AllocatorSettings.parse("max_split_size_mb:40,max_split_size_mb:50").max_split_size == 50 * MIB


def test_the_rounding_without_a_split_follows_the_large_segment():
    assert AllocatorSettings.parse("large_segment_size_mb:64").max_non_split_rounding_size == 64 * MIB


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("expandable_segment:True", r"has no option expandable_segment: there are expandable_segments, max_split"),
        ("expandable_segments=True", r"expandable_segments=True is no option: write option:value pairs"),
        ("expandable_segments:true", r"expandable_segments:true cannot be used: it takes True or False"),
        ("expandable_segments", r"expandable_segments is no option"),
        ("max_split_size_mb:512MB", r"max_split_size_mb:512MB cannot be used: it takes a whole number of MiB"),
        ("max_split_size_mb:19", r"max_split_size_mb:19 cannot be used: it takes 20 or more"),
        ("large_segment_size_mb:64,max_split_size_mb:32", r"max_split_size_mb:32 cannot be used: it takes 64 or more"),
        ("max_non_split_rounding_mb:10", r"max_non_split_rounding_mb:10 cannot be used: it takes 20 or more"),
        ("large_segment_size_mb:10", r"large_segment_size_mb:10 cannot be used: it takes a whole number of MiB above"),
        ("garbage_collection_threshold:80%", r"threshold:80% cannot be used: it takes a number above 0 and below 1"),
        ("garbage_collection_threshold:1.0", r"a number above 0 and below 1"),
        ("garbage_collection_threshold:nan", r"a number above 0 and below 1"),
        ("per_process_memory_fraction:1.5", r"it takes a number from 0 to 1"),
        (
            "roundup_power2_divisions:3",
            r"roundup_power2_divisions:3 cannot be used: it takes a power of two, or a list",
        ),
        ("roundup_power2_divisions:[300:4]", r"it takes a power of two, or a list"),
        ("roundup_power2_divisions:[256]", r"it takes a power of two, or a list"),
        ("roundup_power2_divisions:[256:4", r"roundup_power2_divisions:\[256:4 is no option"),
        ("backend:cudaMallocAsync", r"backend:cudaMallocAsync cannot be used: it takes native"),
        ("max_split_size_mb:40,,", r": , is no option"),
        ("max_split_size_mb:" + "9" * 70 + "x", r"max_split_size_mb:9{60}\.\.\. cannot"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(text, told):
    with pytest.raises(UsageError, match=told) as refused:
        AllocatorSettings.parse(text, name="PYTORCH_ALLOC_CONF")
    assert str(refused.value).startswith("PYTORCH_ALLOC_CONF")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("environ", "split"),
    [
        ({}, None),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:50"}, 50),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:50", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:40"}, 40),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:50", "PYTORCH_CUDA_ALLOC_CONF": ""}, None),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:50", "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:60"}, 60),
    ],
)
def test_which_variable_counts(environ, split):
    assert AllocatorSettings.from_environment(environ).max_split_size == (split and split * MIB)


def test_a_bad_text_in_the_environment_names_its_variable():
    with pytest.raises(UsageError, match=r"^PYTORCH_ALLOC_CONF has no option x: there are"):
        AllocatorSettings.from_environment({"PYTORCH_ALLOC_CONF": "x:1"})


POWERS = st.integers(0, 17).map(lambda power: 1 << power)
LISTS = st.lists(st.tuples(st.one_of(POWERS.map(str), st.just(">")), st.one_of(st.just(0), POWERS)), max_size=6).map(
    lambda entries: f"[{','.join(f'{size}:{count}' for size, count in entries)}]"
)


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(POWERS.map(str), LISTS), size=st.integers(1, 1 << 38))
def test_divisions_are_those_that_torch_reads(torchs_divisions, text, size):
    text = f"roundup_power2_divisions:{text}"
    read = AllocatorSettings.parse(text).roundup_power2_divisions
    assert torchs_divisions(text, size) == read[min(max(size.bit_length() - 21, 0), 15)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "expandable_segments:True,max_split_size_mb:20,",
        "max_split_size_mb:40,max_split_size_mb:50",
        "large_segment_size_mb:11,max_split_size_mb:11",
        "garbage_collection_threshold:0.999,per_process_memory_fraction:0",
        " roundup_power2_divisions : [ 256:1 , 512 : 2 ] ",
        "roundup_power2_divisions:[]",
        "backend:native,pinned_use_background_threads:False",
    ],
)
def test_what_we_read_torch_reads(torchs_reader, text):
    AllocatorSettings.parse(text)
    torchs_reader(text)


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:1",
        "large_segment_size_mb:20,max_split_size_mb:19",
        "large_segment_size_mb:10",
        "large_segment_size_mb:20,max_non_split_rounding_mb:19",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:1",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:12",
        "roundup_power2_divisions:[3:4]",
        "roundup_power2_divisions:[4:3]",
        "roundup_power2_divisions:[4:4",
        "max_split_size_mb",
    ],
)
def test_what_torch_refuses_we_refuse(torchs_reader, text):
    with pytest.raises((ValueError, RuntimeError)):
        torchs_reader(text)
    with pytest.raises(UsageError):
        AllocatorSettings.parse(text)


@pytest.mark.parametrize(
    ("divisions", "asked", "size"),
    [
        # Between 1024 and 2048 four divisions are 1024, 1280, 1536, 1792: the example in torch's own comment, in KiB.
        ("4", 1200 * KIB, 1280 * KIB),
        ("4", 1280 * KIB, 1280 * KIB),
        ("4", 1281 * KIB, 1536 * KIB),
        ("4", 1900 * KIB, 2048 * KIB),
        ("4", 2048, 2048),  # not above 512 B times four: the plain rule
        ("4", 1100, 1536),
        ("4", 2049, 2560),
        ("1", 1200 * KIB + 1, 1200 * KIB + 512),
        ("[64:1,128:2,>:1]", 130 * MIB, 192 * MIB),
        ("[64:1,128:2,>:1]", 60 * MIB + 1, 60 * MIB + 512),
        ("[64:1,128:2,>:1]", 300 * MIB + 1, 300 * MIB + 512),
        ("[32768:2]", 100 * GIB, 128 * GIB),
    ],
)
def test_requests_are_rounded_up_to_a_division(divisions, asked, size):
    assert AllocatorSettings.parse(f"roundup_power2_divisions:{divisions}").round_size(asked) == size


ANY = st.sampled_from(
    ["", "large_segment_size_mb:48", "roundup_power2_divisions:2", "roundup_power2_divisions:[2:8,64:2,>:4]"]
).map(AllocatorSettings.parse)


@given(ANY, st.integers(1, 1 << 40))
def test_no_tensor_is_smaller_than_the_least_that_its_segment_tells(read, nbytes):
    assert 1 <= read.least_asked(read.segment_size(read.round_size(nbytes))) <= nbytes


@given(ANY, st.integers(1, 1 << 40))
def test_the_least_is_reached(read, nbytes):
    segment = read.segment_size(read.round_size(nbytes))
    least = read.least_asked(segment)
    assert read.segment_size(read.round_size(least)) == segment


@pytest.mark.parametrize(
    ("size", "segment"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 512, 12), (33 * MIB, 34)],
)
def test_segments_come_in_the_sizes_of_their_pool(size, segment):
    assert AllocatorSettings().segment_size(size) == segment * MIB
    wider = AllocatorSettings.parse("large_segment_size_mb:48")
    assert wider.segment_size(size) == (48 * MIB if segment == 20 else segment * MIB)
