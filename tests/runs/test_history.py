"""Tests for reading a run's metrics: repeated steps, running time, the end of long files, and folders that aren't
runs."""

import json
import os
from pathlib import Path

import pytest

from pretrain.errors import InputError
from pretrain.runs import event_log
from pretrain.runs.event_log import parse_lines
from pretrain.runs.run_folder import METRICS_FILE
from pretrain_tools.runs.history import (
    append_events,
    count_hours,
    current_events,
    find_runs,
    last_start,
    read_end,
    read_history,
    require_run,
    require_runs,
    scores_of,
)
from support.run_logs import end_line, finished_run, start_line, train_line, validation_line, write_run


def steps_of(events, name="train"):
    return [event["step"] for event in events if event["event"] == name]


def test_a_resumed_run_shows_only_the_last_version_of_repeated_steps(tmp_path):
    first = [start_line(), *(train_line(step, loss=9.0) for step in range(1, 9)), validation_line(6, 8.0)]
    second = [start_line(4), {"event": "resume", "step": 4}, *(train_line(s, loss=3.0) for s in range(5, 11))]
    found = read_history(write_run(tmp_path / "run", [*first, *second, validation_line(6, 2.0)]))
    assert steps_of(found.events) == list(range(1, 11))
    assert [event["loss"] for event in found.of("train")] == [9.0] * 4 + [3.0] * 6
    assert [event["loss"] for event in found.validation()["demo"]] == [2.0]
    assert len(found.of("start")) == 2 and len(found.of("resume")) == 1


def test_a_rollback_drops_steps_but_not_incidents():
    events = [start_line(), *(train_line(step) for step in range(1, 10)), validation_line(9, 9.0)]
    events += [{"event": name, "step": 9} for name in ("diagnostics", "stage")]
    events += [{"event": "spike", "step": 9, "loss": 9.0}, {"event": "rollback", "step": 9, "to_step": 5}]
    events += [train_line(6), train_line(7)]
    current = current_events(events)
    assert steps_of(current) == [1, 2, 3, 4, 5, 6, 7]
    assert not {"validation", "diagnostics", "stage"} & {event["event"] for event in current}
    assert steps_of(current, "spike") == [9]


def test_a_start_from_scratch_supersedes_everything_even_step_0():
    events = [
        start_line(),
        validation_line(0, 7.0),
        train_line(1),
        start_line(),
        validation_line(0, 6.0),
        train_line(1),
    ]
    current = current_events(events)
    assert steps_of(current) == [1]
    assert [e["loss"] for e in current if e["event"] == "validation"] == [6.0]


def test_extending_a_finished_run_drops_nothing():
    events = [start_line(), train_line(1), train_line(2), end_line(2), start_line(2, total_steps=4), train_line(3)]
    assert steps_of(current_events(events)) == [1, 2, 3]


def test_the_last_of_several_evaluations_of_the_same_thing_counts():
    line = {"event": "evaluation", "step": 2, "task": "arc_easy"}
    events = current_events([start_line(), train_line(2), {**line, "acc": 0.1}, {**line, "acc": 0.2}])
    assert [event["acc"] for event in events if event["event"] == "evaluation"] == [0.2]


def test_hours_leave_out_the_time_between_a_crash_and_the_restart(tmp_path):
    lines = [start_line(time=0.0), train_line(1, time=3600.0), start_line(0, time=90_000.0)]
    lines += [train_line(1, time=93_600.0), end_line(1) | {"time": 93_600.0}]
    # An evaluation on the next day doesn't count as running time either.
    lines += [{"event": "evaluation", "step": 1, "source": "demo", "loss": 2.0, "time": 180_000.0}]
    found = read_history(write_run(tmp_path / "run", lines))
    assert found.of("train")[0]["hours"] == pytest.approx(2.0)
    assert found.events[-1]["hours"] == pytest.approx(2.0)


def test_truncated_and_invalid_lines_are_skipped():
    lines = [b'{"event": "train", "step": 1}\n', b'{"event": "tra', b"[1]\n", b'{"step": 2}\n', b'{"event": 3}\n']
    lines += [b'{"event": "train", "step": "two"}\n', b"\xff\xfe\n"]
    lines += [b'{"event": "train", "step": 2, "loss": ' + b"9" * digits + b"}\n" for digits in (301, 5000)]
    assert parse_lines(lines) == [{"event": "train", "step": 1}]


def test_scores_of_tasks_and_of_sources():
    of_task, *_ = scores_of({"event": "evaluation", "step": 5, "task": "arc", "acc,none": 0.3, "acc_stderr,none": 0.1})
    assert (of_task.name, of_task.value, of_task.standard_error) == ("arc · acc", 0.3, 0.1)
    line = {"event": "evaluation", "step": 5, "source": "docs", "split": "validation", "loss": 2.0, "perplexity": 7.4}
    assert [(score.name, score.value) for score in scores_of(line)] == [
        ("docs validation · loss", 2.0),
        ("docs validation · perplexity", 7.4),
    ]
    without_error, *_ = scores_of({"event": "evaluation", "task": "arc", "acc": 0.4, "acc_stderr": None})
    assert (without_error.name, without_error.value, without_error.standard_error) == ("arc · acc", 0.4, None)
    assert scores_of({"event": "evaluation", "task": "arc", "acc": None}) == []


def test_only_measures_of_an_evaluation_are_scores():
    line = {"event": "evaluation", "step": 5, "tokens": 9, "model": "x", "task": "arc", "acc": 0.3, "acc_stderr": 0.1}
    about = {"few_shots": 5, "limit": 20.0, "is_part": False, "time": 1.0}
    (score,) = scores_of(line | about)
    assert (score.name, score.value, score.standard_error) == ("arc (5-shot) · acc", 0.3, 0.1)
    assert scores_of(line | about | {"is_part": True}) == []
    zero_shot = line | about | {"few_shots": 0}
    assert len(current_events([line | about, zero_shot])) == 2, "results with different shots must both be kept"


def test_events_that_cannot_be_appended_give_a_warning(tmp_path, capsys):
    append_events(tmp_path / "gone", [{"event": "publish"}])
    assert f"warning: cannot append to {tmp_path}/gone/metrics.jsonl" in capsys.readouterr().err


def test_lines_of_another_process_neither_break_lines_nor_count_hours(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 1, "time": 0}\n{"event": "tra')
    append_events(tmp_path, [{"event": "publish", "step": 1, "time": 7200}, {"event": "end", "time": 36}])
    lines = parse_lines((tmp_path / "metrics.jsonl").read_bytes().splitlines())
    assert [line["event"] for line in lines] == ["train", "publish", "end"]
    count_hours(lines)
    assert lines[-1]["hours"] == 0.01


def test_the_end_of_a_long_file_holds_the_last_step_and_the_last_validation(tmp_path, monkeypatch):
    lines = [start_line(), *(train_line(step) for step in range(1, 3000))]
    lines[1500:1500] = [validation_line(1499, 4.0, "web"), validation_line(1499, 3.0, "code")]
    run = write_run(tmp_path / "run", lines)
    assert (run / "metrics.jsonl").stat().st_size > 5 * (1 << 16)
    events = read_end(run)
    assert steps_of(events)[-1] == 2999
    assert [e["source"] for e in events if e["event"] == "validation"] == ["web", "code"]
    monkeypatch.setattr(event_log, "END_BYTES", 1 << 16)
    assert steps_of(read_end(run), "validation") == []


def test_the_end_of_a_short_file_is_the_whole_file(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), train_line(1)])
    assert [event["event"] for event in read_end(run)] == ["start", "train"]


def test_the_end_of_a_rolled_back_file_omits_superseded_lines(tmp_path):
    lines = [
        start_line(),
        *(train_line(step) for step in range(1, 11)),
        {"event": "rollback", "step": 10, "to_step": 6},
    ]
    assert steps_of(read_end(write_run(tmp_path / "run", lines)))[-1] == 6


@pytest.mark.parametrize("place", [0, 1, 5000, 9999])
def test_the_newest_start_is_found_anywhere_in_the_file(tmp_path, place):
    lines = [train_line(step) for step in range(1, 10_000)]
    lines.insert(place, start_line(place, start_id="newest"))
    if place:
        lines.insert(0, start_line(0, start_id="first"))
    run = write_run(tmp_path / "run", lines)
    assert (run / "metrics.jsonl").stat().st_size > 1 << 21  # longer than several read blocks
    assert last_start(run)["start_id"] == "newest"


def test_a_file_without_a_start_has_none(tmp_path):
    assert last_start(write_run(tmp_path / "run", [train_line(1)])) == {}


def test_runs_are_found_in_subfolders_but_not_within_runs(tmp_path):
    for name in ("b", "sweep/a", "sweep/.hidden"):
        finished_run(tmp_path / name)
    finished_run(tmp_path / "b" / "copy")
    assert [str(run.relative_to(tmp_path)) for run in find_runs(tmp_path)] == ["b", "sweep/a"]


def test_folders_that_are_not_runs_get_specific_messages(tmp_path):
    run = finished_run(tmp_path / "runs" / "llama")
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "runs" / "lama": f"no such run; did you mean {run}?",
        tmp_path / "nowhere" / "x": "no such run",
        tmp_path / "runs": f"is not a run, or has not started: it has no metrics.jsonl; runs in this folder: {run}",
        run / "config.yaml": "no such run",
        tmp_path / "empty": "is not a run, or has not started",
    }
    for folder, message in cases.items():
        with pytest.raises(InputError) as error:
            require_run(folder)
        assert message in str(error.value)
    with pytest.raises(InputError) as error:
        require_runs([run, *cases])
    assert len(error.value.problems) == len(cases)


def test_a_run_without_events_says_to_wait(tmp_path):
    run = write_run(tmp_path / "run", [])
    with pytest.raises(InputError, match="contains no events yet; wait until the run has started"):
        read_history(run)


def test_an_unfinished_line_is_ignored(tmp_path):
    run = write_run(tmp_path / "run", [start_line(), train_line(1)])
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(train_line(2))[:30])
    assert steps_of(read_end(run)) == [1] and steps_of(read_history(run).events) == [1]


def test_a_typo_suggests_similar_names_in_the_same_folder_only(tmp_path, monkeypatch):
    for name in ("demo", "deep/er/demo"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / METRICS_FILE).touch()
    looked = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: looked.append(Path(folder)) or real(folder))
    with pytest.raises(InputError, match=r"no such run; did you mean .*/demo\?"):
        require_run(tmp_path / "dmeo")
    assert set(looked) <= {tmp_path, *tmp_path.iterdir()}
