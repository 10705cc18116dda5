"""The model on which a server of an unknown kind is measured is right about its gradients, and is removed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.helpers.imitated_clients import BATCH, connected, model_on, preference
from tests.helpers.imitations import imitate
from tinker_lightning.errors import Unsupported
from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    yield trainer
    trainer.close()


def test_a_server_that_divides_by_lengths_is_found_and_nothing_is_left(
    trainer: EmbeddedTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with imitate("together", trainer=trainer, cross_entropy="length") as server, connected(server) as service:
        client = model_on(service)
        with pytest.raises(
            Unsupported, match=r"would train wrong .* sequence of 8 tokens is 0\.62\d times that of the"
        ):
            client.forward_backward_custom(BATCH, preference).result()
        assert server.ran["unload_model"] == 1
        assert not list(tmp_path.rglob("*.safetensors"))
    assert not caplog.records


def test_what_cannot_be_removed_is_logged(trainer: EmbeddedTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """Also if nothing could be measured."""
    lacks = {"optim_step", "delete", "unload_model"}
    with imitate("together", trainer=trainer, lacks=lacks) as server, connected(server) as service:
        client = model_on(service)
        with (
            caplog.at_level(logging.INFO, "tinker_lightning.client"),
            pytest.raises(Unsupported, match="it could not be measured"),
        ):
            client.forward_backward_custom(BATCH, preference).result()
    said = [record.getMessage() for record in caplog.records]
    assert sum("measured-" in line and "was saved to measure gradients, and stays on" in line for line in said) == 1
    assert sum("the model" in line and "until the session ends" in line for line in said) == 1
