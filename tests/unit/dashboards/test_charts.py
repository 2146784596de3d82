"""Charts are geometry that can be checked."""

import math

from dashboards.charts import HEIGHT, LEFT, RIGHT, WIDTH, Level, Line, line_chart, round_ticks


def test_it_places_points_in_the_plot() -> None:
    chart = line_chart(
        title="t", summary="s", lines=[Line("a", "ink", ((0, 0), (10, 5)))], y_range=(0, 10)
    )
    assert chart is not None
    first, last = chart.lines[0].path.split()
    assert first == f"{LEFT},{chart.bottom}"
    assert last == f"{WIDTH - RIGHT},{(chart.top + chart.bottom) / 2:g}"


def test_it_is_nothing_without_points() -> None:
    assert line_chart(title="t", summary="s", lines=[Line("a", "ink", ())]) is None
    assert line_chart(title="t", summary="s", lines=[Line("a", "ink", ((math.nan, 1.0),))]) is None


def test_it_draws_a_single_point_without_a_path() -> None:
    chart = line_chart(title="t", summary="s", lines=[Line("a", "ink", ((3, 3),))])
    assert chart is not None
    assert chart.lines[0].path == ""
    assert 0 < chart.lines[0].last[1] < HEIGHT


def test_it_keeps_levels_in_view() -> None:
    chart = line_chart(
        title="t",
        summary="s",
        lines=[Line("a", "ink", ((0, 0), (1, 1)))],
        levels=[Level("l", "bad", 50)],
    )
    assert chart is not None
    assert chart.top <= chart.levels[0].at <= chart.bottom


def test_it_clips_values_outside_a_given_range() -> None:
    chart = line_chart(
        title="t", summary="s", lines=[Line("a", "ink", ((0, -99), (1, 99)))], y_range=(0, 1)
    )
    assert chart is not None
    ys = [float(pair.split(",")[1]) for pair in chart.lines[0].path.split()]
    assert ys == [chart.bottom, chart.top]


def test_it_chooses_round_ticks() -> None:
    assert round_ticks(0, 100) == (0, 20, 40, 60, 80, 100)
    assert len(round_ticks(0.0013, 0.0042)) <= 7
    assert all(abs(tick * 2000 - round(tick * 2000)) < 1e-9 for tick in round_ticks(0.0013, 0.0042))
