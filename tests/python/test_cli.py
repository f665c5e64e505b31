"""The command cula-gdn: what it prints, what it exits with, and that a wrong operator fails its check."""

from __future__ import annotations

import json

import pytest
import torch

from cula.gdn import chunk_gated_delta_rule, library_info
from cula.gdn.cli import check, main

SMALL = ["--tokens", "65", "--heads", "1", "--value-heads", "2", "--key-dim", "16", "--value-dim", "16"]


def test_info_names_version_and_backends(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == library_info().version
    assert "cpu" in facts["backends"]
    assert main(["info"]) == 0
    assert facts["cpu_isa"] in capsys.readouterr().out


def test_check_passes_here(capsys):
    assert main(["check", "--quick", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in rows} == set(check.TOLERANCES)
    assert all(row["passed"] for row in rows)
    # A comparison of float64 with itself would be exact.
    assert any(row["output_error"] > 0 for row in rows if row["dtype"] == "float64")


@pytest.mark.parametrize("fault", ["values", "gradients", "nan", "exception"])
def test_check_fails_for_a_wrong_operator(monkeypatch, capsys, fault):
    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o):
            return o.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.001 * grad

    def wrong(*args, **kwargs):
        if fault == "exception":
            raise ValueError("broken on purpose")
        o, state = chunk_gated_delta_rule(*args, **kwargs)
        if fault == "gradients":
            return WrongGradient.apply(o), state
        return o * (1.001 if fault == "values" else float("nan")), state

    monkeypatch.setattr(check, "chunk_gated_delta_rule", wrong)
    assert main(["check", "--quick", "--device", "cpu", "--dtype", "float32"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    assert ("broken on purpose" in printed) == (fault == "exception")


def test_bench_writes_what_it_measured(tmp_path, capsys):
    results, picture = tmp_path / "results.json", tmp_path / "results.png"
    arguments = ["bench", *SMALL, "--dtype", "float32", "--repeats", "2", "--device", "cpu", "--no-peers"]
    assert main([*arguments, "--json", str(results), "--plot", str(picture)]) == 0
    assert "forward+backward" in capsys.readouterr().out
    written = json.loads(results.read_text())
    assert [row["mode"] for row in written["rows"]] == ["forward", "forward+backward"]
    assert all(row["seconds_min"] > 0 and row["tokens"] == 65 for row in written["rows"])
    assert written["machine"]["version"] == library_info().version
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_compares_with_the_torch_fallback(capsys):
    pytest.importorskip("transformers")
    assert main(["bench", *SMALL, "--dtype", "float32", "--repeats", "1", "--device", "cpu", "--mode", "forward"]) == 0
    assert "transformers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--tokens", "0"], "--tokens"),
        (["bench", "--tokens", "many"], "many"),
        (["bench", "--heads", "3", "--value-heads", "4"], "multiple of --heads 3, got 4"),
        (["bench", "--key-dim", "300", "--no-peers", "--tokens", "16"], "256"),
        (["bench", "--json", "/nonexistent/folder/x.json"], "/nonexistent/folder"),
        (["bench", "--device", "tpu"], "tpu"),
        (["bench", "--threads", "100000"], "at most 1024, got 100000"),
        (["bench", "--plot", "x.xyz"], "x.xyz"),
        (["bench", "--backend", "cuda", "--device", "cpu"], "tensors on cpu, got cuda"),
        (["check", "--backend", "cuda", "--device", "cpu"], "tensors on cpu, got cuda"),
        (["check", "--device", "cuda:99"], "cuda:99"),
        (["check", "--dtype", "int8"], "int8"),
        (["frobnicate"], "frobnicate"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_is_named_and_exits_with_2(arguments, message, capsys):
    try:
        status = main(arguments)
    except SystemExit as stopped:  # argparse's own way
        status = stopped.code
    assert status == 2
    assert message in capsys.readouterr().err
