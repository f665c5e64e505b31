"""The command cula-gdn: what it prints, what it exits with, and that a wrong operator fails its check."""

from __future__ import annotations

import json

import pytest
import torch

from cula.gdn import chunk_gated_delta_rule, library_info
from cula.gdn.cli import check, cp_sim, main
from cula.gdn.simulation import simulate

SMALL = ["--tokens", "65", "--heads", "1", "--value-heads", "2", "--key-dim", "16", "--value-dim", "16"]


def test_info_names_version_and_backends(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == library_info().version
    assert "cpu" in facts["backends"]
    assert main(["info"]) == 0
    assert facts["cpu_isa"] in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"cula-gdn {library_info().version}\n"


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


CP_SIM = ["cp-sim", "--heads", "1", "--value-heads", "2", "--key-dim", "16", "--value-dim", "16"]


def test_cp_sim_shows_partition_comparison_and_model(tmp_path, capsys):
    results, picture = tmp_path / "results.json", tmp_path / "results.png"
    assert main([*CP_SIM, "--links", "25", "100", "--json", str(results), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "0 188 512" in printed
    assert "4,096 bytes" in printed  # 2 heads, 16 x (16 + 16) float32
    assert "100 GB/s" in printed
    written = json.loads(results.read_text())
    assert written["payload_bytes"] == 4096
    assert [row["offsets"] for row in written["partition"]] == [[0, 512], [0, 188, 512], [0, 512], [0, 364, 512]]
    assert [(row["pre"], row["post"]) for row in written["partition"]] == [
        ([0], [1]),
        ([1], [2]),
        ([1], [1]),
        ([2], [0]),
    ]
    assert [row["sends_forward"] for row in written["partition"]] == [True, True, True, False]
    assert [row["sends_backward"] for row in written["partition"]] == [False, True, True, True]
    assert set(written["errors"]) == {"o", "dq", "dk", "dv", "dg", "dbeta"}
    model = written["model"]["rows"]
    assert {row["ranks"] for row in model} == {2**i for i in range(1, 11)}
    assert {row["tokens"] for row in model} == {2**i for i in range(15, 25)}
    times = {(row["link_gb_per_second"], row["ranks"], row["tokens"]): row for row in model}
    for ranks in (2, 1024):
        # A slower link costs more, and longer sequences are shared out better.
        assert times[25.0, ranks, 2**20]["seconds"] > times[100.0, ranks, 2**20]["seconds"]
        assert times[25.0, ranks, 2**24]["efficiency"] > times[25.0, ranks, 2**15]["efficiency"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_cp_sim_counts_the_merges_of_a_layout():
    times = {"token": 0.0, "added": 0.0, "merge": 1.0, "payload": 0, "latency": 0.0}
    assert cp_sim.Model(**times, parts=1).exchange(4, 1.0) == 2 * 3
    # Before the front of rank r lie r slots, and before its back 7 - r.
    assert cp_sim.Model(**times, parts=2).exchange(4, 1.0) == 2 * 7


def test_cp_sim_of_other_partitions(capsys):
    assert main([*CP_SIM, "--ranks", "2", "--layout", "zigzag", "--dtype", "float32"]) == 0
    assert "0 512 876 1024" in capsys.readouterr().out
    arguments = [*CP_SIM, "--ranks", "3", "--lengths", "100", "30", "--dtype", "float64", "--rank-lengths"]
    assert main([*arguments, "64", "0", "66"]) == 0
    assert "0 36 66" in capsys.readouterr().out
    assert main([*arguments, "64", "64", "64"]) == 2
    assert "rank_lengths" in capsys.readouterr().err


def test_cp_sim_fails_for_wrong_ranks(monkeypatch, capsys):
    def forgetful(*arguments, **keywords):
        results = simulate(*arguments, **keywords)
        return {name: 1.1 * x if name == "dk" else x for name, x in results.items()}

    monkeypatch.setattr(cp_sim, "simulate", forgetful)
    assert main(CP_SIM) == 1
    assert "FAIL" in capsys.readouterr().out


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
        (["cp-sim", "--ranks", "3", "--lengths", "10"], "total_tokens"),
        (["cp-sim", "--heads", "3", "--value-heads", "4"], "multiple of --heads 3, got 4"),
        (["cp-sim", "--links", "0"], "positive number, got '0'"),
        (["cp-sim", "--key-dim", "300"], "256"),
        (["cp-sim", "--plot", "/nonexistent/folder/x.png"], "/nonexistent/folder"),
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
