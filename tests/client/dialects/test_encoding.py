"""Requests in the terms of a dialect."""

import pytest

from tests.helpers.imitated_clients import pair
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.client.dialects.encoding import encode_pass, weighted
from tinker_lightning.errors import InvalidInput
from tinker_lightning.types import Datum
from tinker_lightning.types.requests import ForwardBackwardRequest

ZEROS = weighted(pair(3, 1), 0.0)


@pytest.mark.parametrize("weighs", [pair(3, 1), weighted(pair(3, 1), 1.0)], ids=["no weights", "weights"])
def test_a_forward_never_becomes_a_backward_with_a_gradient(weighs: Datum) -> None:
    request = ForwardBackwardRequest("model", 1, [ZEROS, weighs], "cross_entropy", forward_only=True)
    with pytest.raises(InvalidInput, match="datum 1: a forward needs weights of 0 on servers of the dialect 'open-rl'"):
        encode_pass(dialect_named("open-rl"), request)
    assert encode_pass(dialect_named("skyrl"), request)[0] == "forward"
    zeros = ForwardBackwardRequest("model", 1, [ZEROS], "cross_entropy", forward_only=True)
    assert encode_pass(dialect_named("open-rl"), zeros)[0] == "forward_backward"
