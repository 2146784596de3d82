"""Charts are geometry that can be checked."""

import math

import pytest

from dashboards.charts import COMPACT, WIDE, Chart, Frame, Level, Line, line_chart, round_ticks


def chart_of(*points: tuple[float, float], **options: object) -> Chart:
    line = Line("a", "ink", points)
    chart = line_chart(title="t", summary="s", lines=[line], **options)  # type: ignore[arg-type]
    assert chart is not None
    return chart


@pytest.mark.parametrize(("index", "frame"), [(0, WIDE), (1, COMPACT)])
def test_it_places_points_in_the_plot(index: int, frame: Frame) -> None:
    drawing = chart_of((0, 0), (10, 5), y_range=(0, 10)).drawings[index]
    assert drawing.frame == frame
    first, last = drawing.lines[0].path.split()
    assert first == f"{frame.left},{frame.bottom}"
    assert last == f"{frame.right},{(frame.top + frame.bottom) / 2:g}"


def test_it_is_nothing_without_points() -> None:
    for points in ((), ((math.nan, 1.0),)):
        assert line_chart(title="t", summary="s", lines=[Line("a", "ink", points)]) is None


def test_it_draws_a_single_point_without_a_path() -> None:
    line = chart_of((3, 3)).drawings[0].lines[0]
    assert line.path == ""
    assert WIDE.top < line.last[1] < WIDE.bottom


def test_it_keeps_levels_in_view() -> None:
    level = chart_of((0, 0), (1, 1), levels=[Level("l", "bad", 50)]).drawings[0].levels[0]
    assert WIDE.top <= level.at <= WIDE.bottom


def test_it_clips_values_outside_a_given_range() -> None:
    path = chart_of((0, -99), (1, 99), y_range=(0, 1)).drawings[0].lines[0].path
    assert [float(pair.split(",")[1]) for pair in path.split()] == [WIDE.bottom, WIDE.top]


def test_it_shows_fewer_labels_where_there_is_less_room() -> None:
    ticks = [(float(value), str(value)) for value in range(11)]
    wide, compact = chart_of((0, 0), (10, 1), x_ticks=ticks).drawings
    assert len(wide.x_ticks) == 11
    assert 2 <= len(compact.x_ticks) <= COMPACT.x_labels


def test_it_chooses_round_ticks() -> None:
    assert round_ticks(0, 100) == (0, 20, 40, 60, 80, 100)
    ticks = round_ticks(0.0013, 0.0042)
    assert 3 <= len(ticks) <= 7
    assert all(abs(tick * 2000 - round(tick * 2000)) < 1e-9 for tick in ticks)
