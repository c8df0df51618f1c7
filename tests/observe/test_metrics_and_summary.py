"""Metrics files over a resume, the summary made from them, the live view and the plot."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from megatron_agentrl.observe.events import EventLog
from megatron_agentrl.observe.live import LiveView, clock, health, tokens_per_second
from megatron_agentrl.observe.metrics import MetricsWriter, read_metrics
from megatron_agentrl.observe.plot import interval, plot_reward, smoothed
from megatron_agentrl.observe.summary import print_summary, read_summary, serving_commands, summarize, write_summary
from megatron_agentrl.recipe.schema import Dtype

REPOSITORY = Path(__file__).parents[2]


def train_values(step: int, **more: object) -> dict[str, object]:
    return {
        "reward": step / 10,
        "staleness_mean": 0.5,
        "staleness_max": min(1, step - 1),
        "tokens_sampled": 110,
        "tokens_trained": 100,
        "seconds": {"wait": 0.25, "train": 0.5},
        **more,
    }


def small_run(run_dir: Path, steps: int = 4) -> None:
    writer = MetricsWriter(run_dir, tensorboard=False)
    writer.log("warm_start", 1, {"loss": 2.0, "lr": 1e-3, "seconds": 0.1})
    writer.log("publish", 0, {"gap": 2e-6})
    writer.log("eval", 0, {"tag": "before", "success": 0.25, "size": 256, "agent/through_tool": 0.2})
    for step in range(1, steps + 1):
        writer.log("train", step, train_values(step, logprob_gap_max=1e-5 if step == 2 else 1e-7))
        writer.log("publish", step, {"gap": 3e-6})
    writer.log("eval", steps, {"tag": "after", "success": 0.75, "size": 256, "agent/through_tool": 0.6})
    writer.close()


def test_a_resumed_run_drops_what_was_written_about_later_versions(tmp_path):
    small_run(tmp_path)
    writer = MetricsWriter(tmp_path, tensorboard=False, resume_at=2)
    writer.log("train", 3, train_values(3, reward=9.0))
    writer.close()
    assert [(line["kind"], line["step"]) for line in read_metrics(tmp_path)] == [
        ("warm_start", 1), ("publish", 0), ("eval", 0), ("train", 1), ("publish", 1), ("train", 2), ("publish", 2),
        ("train", 3),
    ]  # fmt: skip
    assert read_metrics(tmp_path, "train")[-1]["reward"] == 9.0


def test_a_new_run_starts_an_empty_file(tmp_path):
    small_run(tmp_path)
    MetricsWriter(tmp_path, tensorboard=False).close()
    assert read_metrics(tmp_path) == []


def test_what_is_no_number_is_refused(tmp_path):
    with pytest.raises(TypeError, match="found object"):
        MetricsWriter(tmp_path, tensorboard=False).log("train", 1, {"reward": object()})


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.log("train", 1, train_values(1))
    writer.log("train", 2, train_values(2))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(s.step, round(s.value, 6)) for s in events.Scalars("train/reward")] == [(1, 0.1), (2, 0.2)]
    assert events.Scalars("train/seconds/train")[0].value == 0.5


def test_tensorboard_forgets_the_lost_attempt(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        writer.log("train", step, train_values(step))
    writer.close()
    writer = MetricsWriter(tmp_path, tensorboard=True, resume_at=1)
    writer.log("train", 2, train_values(2, reward=0.9))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(s.step, round(s.value, 6)) for s in events.Scalars("train/reward")] == [(1, 0.1), (2, 0.9)]


def test_the_summary_of_a_small_run(tmp_path):
    small_run(tmp_path)
    trainer, gateway, supervisor = (EventLog(tmp_path, name) for name in ("trainer-0", "gateway-0", "supervisor-0"))
    trainer.record("warm_start", 0.0, 10.0)
    trainer.record("train", 20.0, 24.0)
    trainer.record("wait", 24.0, 25.0)
    trainer.record("train", 25.0, 29.0)
    gateway.record("engine_busy", 22.0, 27.0)
    gateway.record("engine_busy", 23.0, 26.0)
    supervisor.point("started", role="trainer-0")
    supervisor.point("end", code=0)
    summary = summarize(tmp_path, staleness_bound=1)
    assert summary["seconds"].pop("total") >= 0
    assert summary == {
        "success_before": 0.25,
        "success_after": 0.75,
        "success_through_tool_after": 0.6,
        "steps": 4,
        "staleness_bound": 1,
        "staleness_max": 1,
        "logprob_gap_max": 3e-6,
        "overlap": 0.5,
        "tokens_sampled": 440,
        "tokens_trained": 400,
        "seconds": {"warm_start": 10.0, "wait": 1.0, "train": 8.0},
    }


def test_the_time_between_a_killed_start_and_the_next_does_not_count(tmp_path):
    lines = [("started", "a", 0.0), ("started", "b", 1.0), ("ready", "a", 9.0)]  # killed: no end
    lines += [("started", "a", 1000.0), ("started", "b", 1001.0), ("end", "", 1010.0), ("started", "a", 5000.0)]
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "supervisor-0.jsonl").write_text(
        "".join(json.dumps({"name": name, "role": role, "time": at}) + "\n" for name, role, at in lines)
    )
    assert summarize(tmp_path, 1)["seconds"]["total"] == 9.0 + 10.0


def test_the_summary_is_written_and_shown(tmp_path, capsys):
    small_run(tmp_path)
    summary = summarize(tmp_path, 1)
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary
    print_summary(tmp_path, summary)
    shown = capsys.readouterr().out
    for text in ("success before", "25.0 %", "75.0 %", "80.0 %", "440 / 400", "3e-06"):
        assert text in shown


def test_a_run_without_held_out_prompts_has_no_success(tmp_path, capsys):
    MetricsWriter(tmp_path, tensorboard=False).close()
    summary = summarize(tmp_path, 0)
    assert (summary["success_before"], summary["success_after"], summary["staleness_max"]) == (None, None, None)
    print_summary(tmp_path, summary)
    assert "–" in capsys.readouterr().out


def test_the_serving_commands_are_one_line_each_and_carry_the_question():
    assert "--model 'my runs/x/export'" in serving_commands("my runs/x", [], 14, Dtype.fp32)[0]
    serve, ask = serving_commands("runs/x", [{"role": "user", "content": "it's 1+1=?"}], 14, Dtype.fp32)
    assert "-m vllm.entrypoints.openai.api_server --model runs/x/export --served-model-name x --dtype float32" in serve
    words = subprocess.run(["bash", "-c", f'set -- {ask}; echo "${{@: -1}}"'], capture_output=True, text=True).stdout
    assert json.loads(words) == {
        "model": "x", "max_tokens": 14, "messages": [{"role": "user", "content": "it's 1+1=?"}],
    }  # fmt: skip


def test_plain_lines_are_printed_when_piped(tmp_path):
    out = io.StringIO()
    with LiveView(tmp_path, steps=4, warm_start_steps=1, out=out) as view:
        view.tick({"engine-0": "starting", "trainer-0": "running"})
        small_run(tmp_path)
        view.tick({"engine-0": "running", "trainer-0": "running"})
        assert view.phase() == "step 4/4"
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines[0] == "processes: 1 running; starting: engine-0"
    assert lines[1] == "processes: 2 running"
    assert "warm start 1/1: loss 2.000" in lines
    assert "held-out (after, version 4): success 0.750 of 256; through_tool 0.600" in lines
    assert sum(line.startswith("step ") for line in lines) == 4


def test_the_panel_shows_phase_reward_staleness_speed_and_health(tmp_path):
    from rich.console import Console

    view = LiveView(tmp_path, steps=8, warm_start_steps=1, live=True, out=io.StringIO())
    small_run(tmp_path)
    view.tick({"engine-0": "running"})
    console = Console(file=io.StringIO(), width=100)
    console.print(view)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("step 4/8", "0.400", "mean 0.50, largest 1", "tokens/s", "0.750 at version 4", "1 running"):
        assert text in shown


def test_a_resume_that_cuts_the_file_does_not_confuse_the_view(tmp_path):
    small_run(tmp_path, steps=6)
    out = io.StringIO()
    view = LiveView(tmp_path, steps=8, warm_start_steps=1, out=out)
    writer = MetricsWriter(tmp_path, tensorboard=False, resume_at=2)
    view.tick({})
    writer.log("train", 3, train_values(3))
    view.tick({})
    assert view.last["train"]["step"] == 3
    assert [line.partition("] ")[2].partition(":")[0] for line in out.getvalue().splitlines()] == ["step 3/8"]


def test_a_resumed_run_shows_where_it_stands_and_counts_the_time_left_from_its_own_steps(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now - 86_400)
    small_run(tmp_path, steps=6)
    monkeypatch.undo()
    view = LiveView(tmp_path, steps=9, warm_start_steps=1, out=io.StringIO())
    view.tick({"engine-0": "starting"})
    assert view.phase() == "starting, step 6/9 reached before"
    writer = MetricsWriter(tmp_path, tensorboard=False, resume_at=6)
    for step in (7, 8):
        writer.log("train", step, train_values(step))
    view.tick({"engine-0": "running"})
    assert view.phase() == "step 8/9"
    left = view.seconds_left()
    assert left is not None
    assert left < 60


def test_a_cut_file_that_grew_past_its_old_length_is_read_from_the_start(tmp_path):
    out = io.StringIO()
    view = LiveView(tmp_path, steps=20, warm_start_steps=1, out=out)
    small_run(tmp_path, steps=3)
    view.tick({})
    writer = MetricsWriter(tmp_path, tensorboard=False, resume_at=2)
    for step in range(3, 12):
        writer.log("train", step, train_values(step, note="x" * 100))
    view.tick({})
    assert view.phase() == "step 11/20"


def test_an_evaluation_that_nobody_answered_is_shown_as_that(tmp_path):
    out = io.StringIO()
    view = LiveView(tmp_path, steps=4, warm_start_steps=0, out=out)
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.log("eval", 0, {"tag": "before", "success": None, "size": 8, "finished": 0})
    writer.log("train", 1, train_values(1))
    view.tick({})
    assert "held-out (before, version 0): success unknown (no answer) of 8" in out.getvalue()
    assert plot_reward(tmp_path, 1) is not None
    assert summarize(tmp_path, 1)["success_before"] is None


def test_a_metric_named_as_a_key_of_the_line_does_not_replace_it(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.log("eval", 3, {"success": 0.5, "time": 9.0, "step": 7.0})
    (line,) = read_metrics(tmp_path)
    assert (line["step"], line["step_"], line["time_"]) == (3, 7.0, 9.0)
    assert line["time"] > 1e9


def show(run_dir: Path, columns: int, rows: int, code: str) -> tuple[str, str]:
    """What a program that ticks a LiveView writes to a terminal of that size, and to a standard error elsewhere."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin", "TERM": "xterm"}
    program = subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=env
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the program has ended
        while chunk := os.read(ours, 65536):
            seen += chunk
    os.close(ours)
    assert program.stderr is not None
    err = program.stderr.read().decode()
    assert program.wait() == 0, err
    return seen.decode(), err


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50), (30, 10)])
def test_the_panel_keeps_its_height_at_any_width_and_errors_go_where_the_user_sent_them(tmp_path, columns, rows):
    code = (
        "import sys; from megatron_agentrl.observe.live import LiveView\n"
        "with LiveView(sys.argv[1], steps=4, warm_start_steps=0) as view:\n"
        "    view.tick({f'engine-{i}': 'starting' for i in range(50)})\n"
        "    print('engine-7 ended', file=sys.stderr, flush=True)\n"
    )
    seen, err = show(tmp_path / "[/run]", columns, rows, code)
    frame = seen[seen.rindex("╭") : seen.rindex("╯") + 1]
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).splitlines()
    assert len(lines) == 5  # two borders, phase, time, health
    assert max(map(len, lines)) <= columns
    assert "[/run]" in lines[0] or columns < 80
    assert err == "engine-7 ended\n"


def test_small_words():
    assert (clock(65), clock(3661)) == ("1:05", "1:01:01")
    assert health({}) == "–"
    lines = [{"time": 0.0, "tokens_trained": 5}, {"time": 2.0, "tokens_trained": 100}]
    assert tokens_per_second(lines) == 50.0
    assert tokens_per_second(lines[:1]) == 0.0


def test_sampling_error_and_smoothing():
    low, high = interval(0.5, 256)
    assert (round(low, 3), round(high, 3)) == (0.439, 0.561)
    assert interval(1.0, 256)[0] < 0.99
    assert smoothed([0.0, 3.0, 6.0], window=3) == [1.5, 3.0, 4.5]


def test_the_plot_is_drawn(tmp_path):
    assert plot_reward(tmp_path, 1) is None
    small_run(tmp_path)
    path = plot_reward(tmp_path, 1)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


def test_observing_needs_no_torch():
    code = (
        "import sys; from megatron_agentrl.observe import metrics, summary, live, plot, events; import tempfile;"
        "metrics.MetricsWriter(tempfile.mkdtemp()).log('train', 1, {'a': 1.0}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin"})
