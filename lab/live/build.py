"""Makes docs/index.html: page.html, panels.js, core.js, workers.js, fit.js, the kernel and the first model, in one.

    python lab/live/build.py [ADDRESS]

ADDRESS is where the repository's files can be read, such as https://github.com/NAME/scalerl/blob/main: the page then
links to the file of each concept, and otherwise only names it. The fit, lab/law/fit.js, also goes into
lab/law/forecast.html. Where `wat2wasm` is at hand (`npm install --prefix FOLDER wabt`, then FOLDER/node_modules/.bin on
the PATH), kernel.wasm is assembled anew from kernel.wat.
"""

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tasks.arithmetic import DISCOVER_POOL, FIRST_MODELS, WORDS, ChainTask

PAGE, FORECAST, FIT = (
    ROOT / "docs" / "index.html",
    ROOT / "lab" / "law" / "forecast.html",
    ROOT / "lab" / "law" / "fit.js",
)
WAT, WASM = HERE / "kernel.wat", HERE / "kernel.wasm"
POSITIONS = 48  # the longest prompt has 10 tokens, the longest completion 25
BLOCK = """input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.q_norm self_attn.k_norm
    self_attn.o_proj post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj""".split()


def shape(config: dict) -> dict[str, int]:
    """What core.js calls V, H, LAYERS, N, KV, D, F and L, of a Qwen3's config.json."""
    names = {
        "V": "vocab_size",
        "H": "hidden_size",
        "LAYERS": "num_hidden_layers",
        "N": "num_attention_heads",
        "KV": "num_key_value_heads",
        "D": "head_dim",
        "F": "intermediate_size",
    }
    return {short: config[name] for short, name in names.items()} | {"L": POSITIONS}


def order(layers: int) -> list[str]:
    """The parameters of a Qwen3 in the order of `named` in core.js."""
    blocks = [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in BLOCK]
    return ["model.embed_tokens.weight", *blocks, "model.norm.weight"]


def data(address: str) -> dict:
    """What the page reads: where the files are, the model's shape, the words and the held-out problems; and in base64
    its weights as float16 and the kernel."""
    folder = FIRST_MODELS / "discover"
    config = json.loads((folder / "config.json").read_text())
    parameters = load_file(folder / "model.safetensors")
    weights = np.concatenate([parameters[name].ravel() for name in order(config["num_hidden_layers"])])  # (P,)
    task = ChainTask(0, DISCOVER_POOL)
    return {
        "address": address.rstrip("/") + "/" if address else "",
        "shape": shape(config),
        "words": WORDS,
        "held_out": [task.text(problem.prompt_ids) for problem in task.held_out],
        "kernel": base64.b64encode(WASM.read_bytes()).decode(),
        "weights": base64.b64encode(weights.astype("<f2").tobytes()).decode(),
    }


def page(address: str = "") -> str:
    """The text of docs/index.html."""
    text = (HERE / "page.html").read_text()
    files = {"CORE": HERE / "core.js", "WORKERS": HERE / "workers.js", "FIT": FIT, "PANELS": HERE / "panels.js"}
    parts = {name: path.read_text() for name, path in files.items()} | {"DATA": json.dumps(data(address))}
    for name, part in parts.items():
        text = text.replace(f"/*{name}*/", part.replace("</", "<\\/"))  # `</` would end the script
    return text


def forecast_page() -> str:
    """The text of lab/law/forecast.html with lab/law/fit.js in it."""
    fit = FIT.read_text().replace("\\", r"\\")
    return re.sub(r'(<script id="fit">\n).*?(</script>)', rf"\1{fit}\2", FORECAST.read_text(), flags=re.S)


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:2] == ["--help"]:
        sys.exit(__doc__)
    if assembler := shutil.which("wat2wasm"):
        subprocess.run([assembler, WAT, "-o", WASM], check=True)
    PAGE.write_text(page(*sys.argv[1:]))
    FORECAST.write_text(forecast_page())
    print(f"{PAGE.relative_to(ROOT)}: {PAGE.stat().st_size:,} bytes")
