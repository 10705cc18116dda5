"""Test utilities: a real trainer in the same process, and transports that record requests or inject faults.

@pytest.fixture
def service():
    with tinker_lightning.testing.embedded_service() as service:
        yield service
"""

from tinker_lightning.testing.embedded_service import (
    Fault,
    FaultyTransport,
    RecordedRequest,
    RecordingTransport,
    embedded_service,
)

__all__ = ["Fault", "FaultyTransport", "RecordedRequest", "RecordingTransport", "embedded_service"]
