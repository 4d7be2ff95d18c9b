"""`octavo layout`, in process, and that docs/layout.md holds what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.bench import simulator
from octavo.cli import app
from octavo.layout_command import markdown_table

YI_34B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "hidden_size": 7168,
    "intermediate_size": 20480,
    "num_hidden_layers": 60,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "vocab_size": 64000,
    "max_position_embeddings": 200000,
}
runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(YI_34B))
    return str(tmp_path)


def test_the_document_holds_the_table() -> None:
    document = (Path(__file__).parent.parent / "docs" / "layout.md").read_text()
    start = "<!-- octavo.layout_command.markdown_table() -->\n"
    assert document.split(start)[1].split("<!-- end -->")[0] == markdown_table()


def test_the_blocks_of_a_model_are_printed_with_the_chosen_one_marked(model: str) -> None:
    lines = runner.invoke(app, ["layout", model]).output.splitlines()
    assert lines[0].endswith("60 layers, 8 KV heads a rank of 128, 240 KiB a token")
    assert "* 128 tokens in 30 MiB: 14.88 MiB wasted by a sequence" in lines
    assert lines[4].startswith("  8 tokens in 2 MiB, 4 padding layers (6.2%)")
    assert "1024 tokens in 240 MiB" in lines[5]


def test_json_of_a_config_file_on_two_ranks_in_float32(model: str) -> None:
    arguments = ["layout", f"{model}/config.json", "--json", "--tensor-parallel", "2"]
    arguments += ["--dtype", "float32", "--expected-length", "500", "--page-size", "256KiB"]
    report = json.loads(runner.invoke(app, arguments).stdout)
    assert (report["num_kv_heads"], report["token_bytes"]) == (4, 240 * 1024)
    assert report["page_bytes"] == 256 * 1024
    assert report["chosen"] in report["candidates"]
    assert report["chosen"]["block_size"] == 16
    assert report["vattention"]["num_pages"] == 120


def test_a_page_that_is_no_whole_number_of_tokens_is_told_so(tmp_path: Path) -> None:
    """SmolLM2-135M: 3 heads of 64 in 30 layers are 384 bytes a token in each of 60 tensors."""
    shape = {"hidden_size": 576, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(YI_34B | shape | heads))
    arguments = ["layout", str(tmp_path), "--page-size", "64KiB"]
    text = runner.invoke(app, arguments).stdout
    assert "170.7 tokens in 3.75 MiB, a page in each of 60: 1.871 MiB wasted" in text
    report = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert report["vattention"]["num_pages"] == 60
    assert report["vattention"]["block_bytes"] == 60 * 65536
    assert report["vattention"]["tokens_per_page"] == pytest.approx(65536 / 384, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "kib"),
    [
        (["--kv-dtype", "fp8"], 120),
        (["--kv-cache-dtype", "fp8_e4m3", "--dtype", "float32"], 120),
        (["--kv-dtype", "fp16", "--dtype", "float32"], 240),
        (["--kv-dtype", "auto", "--dtype", "float32"], 480),
    ],
)
def test_keys_and_values_in_another_dtype(model: str, arguments: list[str], kib: int) -> None:
    report = json.loads(runner.invoke(app, ["layout", model, "--json", *arguments]).stdout)
    assert report["token_bytes"] == kib * 1024


def test_a_checkpoint_may_ask_for_fp8(tmp_path: Path) -> None:
    scheme = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    (tmp_path / "config.json").write_text(json.dumps(YI_34B | {"quantization_config": scheme}))
    report = json.loads(runner.invoke(app, ["layout", str(tmp_path), "--json"]).stdout)
    assert report["token_bytes"] == 120 * 1024


def test_an_explicit_block_size(model: str) -> None:
    arguments = ["layout", model, "--json", "--block-size"]
    report = json.loads(runner.invoke(app, [*arguments, "16"]).stdout)
    assert report["candidates"] == [report["chosen"]]
    assert report["chosen"]["num_padding_layers"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "100"], "block_size 100 cannot be mapped"),
        (["--block-size", "0"], "block_size must be at least 1"),
        (["--page-size", "3MiB"], "page_size must be host or a power of two"),
        (["--page-size", "0"], "page_size must be host or a power of two"),
        (["--page-size", "big"], "page_size must be host or a power of two"),
        (["--tensor-parallel", "3"], "must divide the model's 8 key-value heads"),
        (["--tensor-parallel", "0"], "must divide the model's 8 key-value heads"),
        (["--dtype", "int3"], "dtype must be auto, bfloat16"),
        (["--kv-dtype", "int3"], "kv_dtype must be auto, bf16, fp16, fp8"),
        (["--expected-length", "0"], "expected_length must be at least 1"),
    ],
)
def test_a_mistake_is_one_readable_line(model: str, arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["layout", model, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_torch_is_not_loaded(model: str) -> None:
    code = "import sys; from octavo.cli import app\n"
    code += "try: app(['layout', sys.argv[1]])\nexcept SystemExit as end: assert not end.code\n"
    code += "assert not {'torch', 'numba', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, model], check=True, stdout=subprocess.DEVNULL)


def test_the_hosts_page(model: str) -> None:
    result = runner.invoke(app, ["layout", model, "--page-size", "host"])
    assert result.exit_code == 0


def test_a_short_dtype_is_its_long_one() -> None:
    shape = Path(simulator.__file__).with_name("shapes") / "llama-3.1-8b.json"
    results = [
        runner.invoke(app, ["layout", str(shape), "--dtype", dtype, "--json"])
        for dtype in ("fp32", "float32")
    ]
    assert [result.exit_code for result in results] == [0, 0]
    assert results[0].stdout == results[1].stdout
