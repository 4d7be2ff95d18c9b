from __future__ import annotations

from octavo.bench import simulator


def test_every_row_count_is_reported() -> None:
    figure = simulator.measure(4, steps=40, rounds=2)
    assert figure.rows == 4
    assert 0 < figure.plan_us < figure.step_us
    assert 0 < figure.update_us < figure.step_us
    assert figure.tokens_per_second > 0
