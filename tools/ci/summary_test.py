import json

import pytest

from tools.ci import durations, summary

_REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><skipped/></testcase>
</testsuite></testsuites>"""


def _result(label, status, report=None, shard=1, cached=False, seconds=0.0):
    outputs = [{"name": "test.xml", "uri": report.as_uri()}] if report else []
    return json.dumps(
        {
            "id": {"testResult": {"label": label, "run": 1, "shard": shard, "attempt": 1}},
            "testResult": {
                "status": status,
                "cachedLocally": cached,
                "testActionOutput": outputs,
                "testAttemptDurationMillis": str(round(1000 * seconds)),
            },
        }
    )


def test_cases_of_all_shards_and_cached_results_count(tmp_path):
    report = tmp_path / "a report.xml"
    report.write_text(_REPORT)
    lines = [_result("//:a", "FAILED", report, shard) for shard in (1, 2)] + [
        _result("//:b", "FAILED", report, cached=True)
    ]
    assert summary.summarize(lines) == (3, 3, 3)


def test_crash_time_out_and_unbuilt_target_are_one_failure_each(tmp_path):
    unbuilt = json.dumps({"id": {"targetCompleted": {"label": "//:c"}}, "completed": {}})
    built = json.dumps({"id": {"targetCompleted": {"label": "//:d"}}, "completed": {"success": True}})
    lines = [_result("//:a", "TIMEOUT"), _result("//:b", "FAILED", tmp_path / "missing.xml"), unbuilt, built]
    assert summary.summarize(lines) == (0, 3, 0)


def test_last_attempt_of_a_flaky_test_counts(tmp_path):
    report = tmp_path / "test.xml"
    report.write_text('<testsuite><testcase name="a"/></testsuite>')
    assert summary.summarize([_result("//:a", "FAILED"), _result("//:a", "FLAKY", report)]) == (1, 0, 0)


def test_nothing_run_is_a_failure(tmp_path, capsys):
    events = tmp_path / "events.json"
    events.write_text("")
    assert summary.main(str(events)) == 1
    assert capsys.readouterr().out.endswith("\n0 passed, 0 failed, 0 skipped\n")


def _report(path, cpu_seconds):
    path.write_text(
        f"""<testsuites><testsuite><properties><property name="cpu_seconds" value="{cpu_seconds}"/></properties>
        <testcase name="a"/></testsuite></testsuites>"""
    )
    return path


def test_duration_of_a_target_is_that_of_its_longest_shard(tmp_path):
    one, other = (_report(tmp_path / f"{cpu}.xml", cpu) for cpu in (30.0, 40.5))
    lines = [
        _result("//:a", "PASSED", one, 1, seconds=90),
        _result("//:a", "PASSED", other, 2, seconds=50),
        _result("//:b", "TIMEOUT", seconds=300),
    ]
    assert summary.durations_of(lines) == [
        durations.Duration("//:a", 50, 40.5),
        durations.Duration("//:b", 300, None),
    ]


@pytest.mark.parametrize(("times", "code"), [(1.0, 1), (3.0, 0)])
def test_a_target_that_is_too_slow_for_the_machine_fails(tmp_path, monkeypatch, capsys, times, code):
    monkeypatch.setattr(durations, "slowness", lambda seconds: times)
    events = tmp_path / "events.json"
    events.write_text(_result("//:a", "PASSED", _report(tmp_path / "a.xml", 250.0), seconds=260))
    assert summary.main(str(events)) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [" seconds      CPU", "   260.0    250.0 //:a"]
    assert any(line.startswith("TOO SLOW //:a: 250 seconds") for line in lines) == bool(code)
    assert lines[-1] == "1 passed, 0 failed, 0 skipped"
