"""A third of as many random models over RPC: in one job a number of stages."""

from __future__ import annotations

import pytest

from tests.multi.conftest import Launch
from tests.multi.test_rpc_numbers import ENV

SCRIPT = """
from hypothesis import HealthCheck, Phase, given, settings
from tests.suites.random_models import cases, check

STAGES, EXAMPLES = {stages}, {examples}
done = []

def run(case):
    check(case)
    done.append(case)

for ties in (False, True):
    how = settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                   suppress_health_check=list(HealthCheck))
    how(given(cases(ties=ties, stages=STAGES))(run))()
print("all equal" if len(done) >= EXAMPLES // 2 else len(done))
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stages", [2, 3])
def test_random_models_over_rpc(launch: Launch, stages: int) -> None:
    ended = launch("--stages", str(stages), script=SCRIPT.format(stages=stages, examples=90), env=ENV)
    assert (ended.code, ended.out) == (0, "all equal\n"), ended.err[-3000:]
