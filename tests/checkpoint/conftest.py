"""Stores for tests, a checkpoint in every form, and interrupts."""

import signal

import pytest

from tests.checkpoint.stores import CountingStore, SharedStore, s3_server, write_forms


@pytest.fixture(scope="module")
def s3():
    """A real S3 server with a bucket of the name `models`."""
    with s3_server():
        yield


@pytest.fixture
def root(request, tmp_path):
    """A place of its own in a store, empty."""
    return f"{request.param}/{tmp_path.name}"


@pytest.fixture
def counted(tmp_path):
    """A place in memory where requests are counted."""
    CountingStore.requests.clear()
    yield f"counted://{tmp_path.name}"
    CountingStore.store.clear()
    CountingStore.lose.clear()


@pytest.fixture
def shared(tmp_path):
    """The same, of a store that all threads share."""
    SharedStore.requests.clear()
    yield f"together://{tmp_path.name}"
    SharedStore.store.clear()
    SharedStore.lose.clear()
    SharedStore.meeting.clear()


@pytest.fixture(scope="session")
def forms(tmp_path_factory):
    """A directory that `write_forms` has filled."""
    at = tmp_path_factory.mktemp("forms")
    write_forms(at)
    return at


@pytest.fixture
def _interruptible():
    """A shell tells what it starts in the background to ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
