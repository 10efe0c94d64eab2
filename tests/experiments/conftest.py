import pytest

from tests.experiments.tiny import save_pair


@pytest.fixture(scope="session")
def models(tmp_path_factory):
  """Paths of a tiny target and a tiny draft."""
  return save_pair(str(tmp_path_factory.mktemp("models")))
