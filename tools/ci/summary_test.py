import json

from tools.ci import summary

_REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><skipped/></testcase>
</testsuite></testsuites>"""


def _result(label, status, report=None, shard=1, cached=False):
    outputs = [{"name": "test.xml", "uri": report.as_uri()}] if report else []
    return json.dumps(
        {
            "id": {"testResult": {"label": label, "run": 1, "shard": shard, "attempt": 1}},
            "testResult": {"status": status, "cachedLocally": cached, "testActionOutput": outputs},
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
    assert capsys.readouterr().out == "0 passed, 0 failed, 0 skipped\n"
