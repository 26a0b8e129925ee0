"""Builds an archive, in parts, that brings vLLM 0.32.0 to a Linux machine with a Hopper GPU, Python 3.12, torch 2.11 (CUDA
13), transformers 5.17 and no package registry.

    python3 build.py FOLDER        # FOLDER/parts/site-*.tar.xz, 38 MiB in all; unpack them into a folder on PYTHONPATH

vLLM's wheel has 327 MB. Kept are its Python code, its main kernels and FlashAttention 3, and of their machine code that of
sm_90; of FlashAttention only bfloat16 with heads of 64 and 128. The rest is cleared inside the libraries, so that it
compresses to nothing. Left out: FlashAttention 2, the kernels for mixtures and for quantised models, FlashInfer (so set
VLLM_USE_FLASHINFER_SAMPLER=0, or vLLM ends at its start), TileLang, CUTLASS' DSL, the Rust front-end.
"""

import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from fatbin import entries

VLLM = "vllm==0.32.0"
NEEDS = """
annotated-types antlr4-python3-runtime==4.13.2 apache-tvm-ffi==0.1.11 astor blake3 cachetools cbor2
compressed-tensors==0.17.0 depyf==0.20.0 dill distro docstring-parser fastapi<0.137 gguf httpx-sse ijson interegular jiter
jsonschema jsonschema-specifications lark==1.2.2 llguidance==1.7.0 lm-format-enforcer==0.11.3 loguru msgspec nvtx==0.2.15
openai<3 oss-harmony==0.0.11 outlines-core==0.2.14 partial-json-parser pybase64 pydantic==2.14.4 pydantic-core==2.50.5
python-json-logger python-multipart pyzmq referencing rpds-py setproctitle sniffio starlette typing-extensions==4.16.0
typing-inspection uvicorn watchfiles xgrammar==0.2.8
datasets==5.2.0 latex2sympy2_extended==1.11.0 math-verify==0.9.0 multiprocess trl==1.16.0
""".split()  # the last line is for the experiments, not for vLLM
PLATFORMS = [f"manylinux_2_{n}" for n in (5, 17, 24, 26, 27, 28, 31, 34, 35)] + ["manylinux1", "manylinux2014"]
LEFT_OUT = """
vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/_moe_C_stable_libtorch.abi3.so vllm/vllm-rs vllm/_flashkda_C.abi3.so
vllm/_deepselect_C.abi3.so vllm/_flashmla_C.abi3.so vllm/_flashmla_extension_C.abi3.so vllm/_qutlass_C.abi3.so
vllm/third_party/deep_gemm vllm/third_party/fmha_sm100 vllm/entrypoints/serve/instrumentator/static vllm/benchmarks
""".split()


def download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    common = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    common += ["--python-version", "3.12", "--implementation", "cp"]
    for name in PLATFORMS:
        common += ["--platform", f"{name}_x86_64"]
    if not list(folder.glob("vllm-*.whl")):
        subprocess.run([*common, VLLM], check=True)
    subprocess.run([*common, *NEEDS], check=True)


def unpack(wheels: Path, site: Path) -> None:
    shutil.rmtree(site, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(site)
    for name in LEFT_OUT:
        path = site / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def clear(library: Path, wanted) -> None:
    """Clears the device code that `wanted(kind, arch, payload)` does not want. Its header then names an architecture
    that no Hopper card has, so the driver passes over it as it passes over those of other cards."""
    data = bytearray(library.read_bytes())
    kept = cleared = 0
    for _, header, start, size, kind, arch, *_ in list(entries(data)):
        if wanted(kind, arch, bytes(data[start : start + size])):
            kept += size
            continue
        data[start : start + size] = bytes(size)
        if arch <= 90:
            struct.pack_into("<I", data, header + 28, 120)  # the architecture
        cleared += size
    library.write_bytes(data)
    print(f"{library.name}: kept {kept / 1e6:.1f} MB of device code, cleared {cleared / 1e6:.1f} MB")


def main_kernels(kind: int, arch: int, payload: bytes) -> bool:
    return (kind == 2 and arch == 90) or (kind == 1 and len(payload) < 2**15)


def attention(kind: int, arch: int, payload: bytes) -> bool:
    names = subprocess.run(
        ["c++filt"], input=b"\n".join(set(re.findall(rb"_Z[A-Za-z0-9_]{20,}", payload))), capture_output=True
    ).stdout
    found = re.findall(
        rb"CollectiveMainloopFwdSm90<\d, .*?> >, cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(\d+)> >, (\d+), ([\w:]+),",
        names,
    )
    if not found:
        return True  # what prepares and combines
    width, value_width, dtype = found[0]
    return dtype == b"cutlass::bfloat16_t" and width == value_width and width in (b"64", b"128")


PARTS = {  # what goes into which archive; a machine with many cores unpacks them at the same time
    "kernels": lambda path: path.startswith("vllm/_C_stable"),
    "attention": lambda path: path.startswith("vllm/vllm_flash_attn/"),
    "models": lambda path: path.startswith(("vllm/model_executor", "vllm/models")),
    "vllm": lambda path: path.startswith("vllm/"),
    "needs": lambda path: True,
}


def pack(site: Path, parts: Path) -> None:
    parts.mkdir(exist_ok=True)
    left = sorted(str(p.relative_to(site)) for p in site.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    for name, belongs in PARTS.items():
        chosen = [path for path in left if belongs(path)]
        left = [path for path in left if path not in set(chosen)]
        target = parts / f"site-{name}.tar.xz"
        with target.open("wb") as file:
            tar = subprocess.Popen(
                ["tar", "-cf", "-", "-T", "-"], cwd=site, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            xz = subprocess.Popen(["xz", "-T0", "-3"], stdin=tar.stdout, stdout=file)
            tar.stdin.write("\n".join(chosen).encode())
            tar.stdin.close()
            if xz.wait() or tar.wait():
                raise RuntimeError(f"{target} could not be written")
        print(f"{target.name}: {len(chosen)} files, {target.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    download(root / "wheels")
    unpack(root / "wheels", root / "site")
    clear(root / "site/vllm/_C_stable_libtorch.abi3.so", main_kernels)
    clear(root / "site/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", attention)
    pack(root / "site", root / "parts")
