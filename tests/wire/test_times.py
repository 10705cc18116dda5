"""Times of listings and addresses come back as datetimes with a zone."""

from __future__ import annotations

from datetime import UTC, datetime

import orjson
import pytest

from tinker_lightning.errors import InvalidMessage
from tinker_lightning.types.responses import ExternalWeightsUrlsResponse
from tinker_lightning.wire.json import dumps, parse


@pytest.mark.parametrize("text", ["2026-01-02T03:04:05+00:00", "2026-01-02T03:04:05Z", "2026-01-02T03:04:05"])
def test_a_time_without_a_zone_is_in_utc(text: str) -> None:  # R5.4
    expected = ExternalWeightsUrlsResponse({}, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert parse(ExternalWeightsUrlsResponse, orjson.dumps({"urls": {}, "expires": text})) == expected
    assert parse(ExternalWeightsUrlsResponse, dumps(expected)) == expected


@pytest.mark.parametrize("value", ["soon", 5])
def test_what_is_not_a_time_is_named(value: object) -> None:
    with pytest.raises(InvalidMessage, match="expires: must be a time in ISO 8601, got"):
        parse(ExternalWeightsUrlsResponse, orjson.dumps({"urls": {}, "expires": value}))
