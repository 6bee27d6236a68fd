"""Builds a stub of NVIDIA's libraries for the CUDA build of PyTorch, into a virtual environment.

    python build.py .venv-cuda

PyTorch's own CUDA code then runs on a machine without a GPU: its allocator, messages, statistics and the host's side of
every operator. What torch's libraries want of each library of NVIDIA's is read from their symbols. Each gets a library
of that name, with the functions of `src/`. Those that are not written there succeed or are refused, without doing
anything. They are put where torch's RPATH looks; `library_path` is for what is loaded by its name.

Needs gcc, g++ and nm. NVIDIA's headers come from the package index: two wheels of 2.4 MB.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SRC: Final = Path(__file__).resolve().parent / "src"
RUNTIME: Final = "libcudart.so.13"
HEADERS: Final = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
NEVER: Final = re.compile(r"(?!)")
ALL: Final = re.compile("")
# Setting up and tearing down succeeds also where the library's work is refused.
LIFE: Final = re.compile(r"(Create|Destroy|Set|Init|Finalize)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library of NVIDIA's.

    Attributes:
        name: Its file, as torch's libraries ask for it.
        folder: The one below `nvidia/` in which torch looks for it.
        sources: The files of `src/` that are written for it.
        macro: What is defined for a file that several libraries share.
        prefix: How its functions begin, where their symbols carry no version.
        version: The version that its symbols carry, where it is not its name.
        refused: What a function that is not written returns. Source: the library's own table of statuses.
        done: The functions that have nothing to do here, and succeed.
    """

    name: str
    folder: str = "cu13"
    sources: tuple[str, ...] = ()
    macro: str = ""
    prefix: str = ""
    version: str = ""
    refused: int = 801
    done: re.Pattern[str] = NEVER


DRIVER: Final = Library(
    name="libcuda.so.1",
    sources=("device.c", "driver.c"),
    prefix=r"cu(?!File)[A-Z]",
    done=re.compile(r"cu(CtxSetCurrent|FuncSet|Launch|LinkAddData|ModuleUnload)"),
)
NVML: Final = Library(name="libnvidia-ml.so.1", sources=("nvml.c",), prefix="nvml")
LIBRARIES: Final = (
    Library(
        name=RUNTIME,
        sources=("runtime.c",),
        done=re.compile(
            r"__cuda(Register|Unregister|PushCall|Launch)"
            r"|cuda(DeviceSynchronize|Stream(Synchronize|Query|WaitEvent)|Event(Query|Synchronize)|Launch(Cooperative)?Kernel"
            r"|FuncSetAttribute|Host(Register|Unregister)|MemcpyToSymbol|Profiler|ThreadExchangeStreamCaptureMode)"
        ),
    ),
    Library(name="libcublas.so.13", sources=("libraries.c",), macro="CUBLAS", done=ALL),
    Library(name="libcublasLt.so.13", sources=("libraries.c",), macro="CUBLASLT", done=ALL),
    Library(name="libnvrtc.so.13", sources=("libraries.c",), macro="NVRTC", done=ALL),
    Library(name="libcupti.so.13", sources=("libraries.c",), macro="CUPTI", done=ALL),
    Library(name="libcusparse.so.12", sources=("libraries.c",), macro="CUSPARSE", refused=10, done=LIFE),
    Library(name="libcusolver.so.12", sources=("libraries.c",), macro="CUSOLVER", refused=9, done=LIFE),
    Library(name="libcufft.so.12", refused=16, done=LIFE),
    Library(name="libcurand.so.10", prefix="curand", done=ALL),
    Library(name="libcufile.so.0", prefix="cuFile", refused=5001),
    Library(name="libcusparseLt.so.0", folder="cusparselt", prefix="cusparseLt", refused=10, done=LIFE),
    Library(name="libnccl.so.2", folder="nccl", sources=("libraries.c",), macro="NCCL", prefix="nccl", refused=5),
    Library(name="libnvshmem_host.so.3", folder="nvshmem", prefix="nvshmem", version="NVSHMEM", refused=1),
    Library(name="libcudnn.so.9", folder="cudnn", sources=("cudnn.c",), done=ALL),
)


def packages(venv: Path) -> Path:
    """Return the environment's `site-packages`."""
    return next(venv.glob("lib/python3*/site-packages"))


def library_path(venv: Path) -> Path:
    """Return the folder that LD_LIBRARY_PATH must name, so that the driver and NVML are found by name."""
    return packages(venv) / "nvidia" / DRIVER.folder / "lib"


def wanted(site: Path) -> dict[str, set[str]]:
    """Read what torch's libraries want, by the library that is to have it."""
    found: dict[str, set[str]] = defaultdict(set)
    by_version = {library.version or library.name: library for library in LIBRARIES}
    unversioned = [library for library in (DRIVER, NVML, *LIBRARIES) if library.prefix]
    libraries = sorted((site / "torch" / "lib").glob("lib*.so"))
    symbols = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    for line in symbols.stdout.splitlines():
        name, _, version = line.rpartition(" ")[2].partition("@")
        library = by_version.get(version.lstrip("@"))
        if library is None and not version:
            library = next((one for one in unversioned if re.match(one.prefix, name)), None)
        if library is not None:
            found[library.name].add(name)
    return found


def headers(venv: Path, build: Path) -> Path:
    """Return the folder of NVIDIA's headers, from the index where it is not there yet."""
    folder = build / "headers"
    if not folder.exists():
        pip = [venv / "bin" / "python", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", build, *HEADERS]
        subprocess.run(pip, check=True)
        for wheel in build.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    _, include, rest = name.partition("/include/")
                    if include and not name.endswith("/"):
                        target = folder / rest
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(archive.read(name))
    return folder


def compile_library(library: Library, functions: set[str], site: Path, build: Path, links: tuple[str, ...]) -> None:
    """Write what is not written by hand, and compile the library."""
    missing = build / f"{library.name}.c"
    done = "stub_lost()" if library.name == RUNTIME else "0"
    lines = ["int stub_lost(void);"] + [
        f'__attribute__((weak, visibility("default"))) long {name}(void) '
        f"{{ return {done if library.done.search(name) else library.refused}; }}"
        for name in sorted(functions)
    ]
    missing.write_text("\n".join(lines) + "\n")
    versions = []
    if library.version:
        script = build / f"{library.name}.map"
        script.write_text(f"{library.version} {{ global: *; }};\n")
        versions = [f"-Wl,--version-script={script}"]
    elif not library.prefix:
        versions = ["-Wl,--default-symver"]
    folder = site / "nvidia" / library.folder / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(
            "gcc",
            "-O2",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Werror",
        ),
        *(f"-I{build / 'headers'}", f"-I{SRC}", *([f"-D{library.macro}"] if library.macro else [])),
        *(str(SRC / source) for source in library.sources),
        *(str(missing), "-o", str(folder / library.name), f"-Wl,-soname,{library.name}", *versions),
        *("-Wl,-rpath,$ORIGIN:$ORIGIN/../../cu13/lib", "-Wl,-z,defs", "-Wl,--no-as-needed", *links),
    ]
    subprocess.run(command, check=True)


def compile_values(site: Path) -> None:
    """Compile what gives operators their values: half a minute, so only where it is older than its source."""
    torch, source, target = site / "torch", SRC / "values.cpp", site / "libstubcuda_values.so"
    if target.exists() and target.stat().st_mtime > source.stat().st_mtime:
        return
    includes = (torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include")
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", *(f"-I{folder}" for folder in includes), str(source)]
    part = target.with_suffix(f".{os.getpid()}")
    subprocess.run([*command, "-o", str(part), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"], check=True)
    part.replace(target)


def install(site: Path) -> None:
    """Put the module where torch finds it by itself."""
    (site / "stubcuda.py").write_text((SRC / "stubcuda.py").read_text())
    about = site / "stubcuda-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stubcuda\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nstubcuda = stubcuda:start\n")


def check(venv: Path) -> None:
    """Refuse an environment whose torch is no CUDA build."""
    if not (packages(venv) / "torch" / "lib" / "libtorch_cuda.so").exists():
        about = next(packages(venv).glob("torch-*.dist-info"), Path("no torch")).name.removesuffix(".dist-info")
        raise SystemExit(
            f"The package index gave {about}, which is no CUDA build: PyPI has one for Linux alone. "
            "On this platform the tests for a GPU cannot run without one."
        )


def main(venv: Path) -> None:
    """Build all of it; each part is written whole or not at all."""
    check(venv)
    site, build = packages(venv), venv / "stubcuda"
    build.mkdir(exist_ok=True)
    headers(venv, build)
    functions = wanted(site)
    compile_library(DRIVER, functions[DRIVER.name], site, build, ("-ldl", "-lpthread"))
    driver = str(library_path(venv) / DRIVER.name)
    compile_library(NVML, functions[NVML.name], site, build, (driver,))
    links = (driver, str(library_path(venv) / NVML.name))
    with ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(compile_library, one, functions[one.name], site, build, links) for one in LIBRARIES]
        parts.append(pool.submit(compile_values, site))
        for part in parts:
            part.result()
    install(site)


if __name__ == "__main__":
    (check if "--check" in sys.argv else main)(Path(sys.argv[-1]).resolve())
