"""Session-wide hooks: end the multi-process support, and fail a session that leaves a process behind."""

from __future__ import annotations

import pytest

from tests.support.ranks import close_session


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    left_behind = close_session()
    if left_behind:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"ERROR: the tests left processes behind: {left_behind}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
