import pytest

from specjax.checkpoints import shipped
from tests.experiments.tiny import save_pair


@pytest.fixture(scope="session")
def models(tmp_path_factory):
  """Paths of a tiny target and a tiny draft."""
  return save_pair(str(tmp_path_factory.mktemp("models")))


@pytest.fixture(autouse=True)
def nothing_shipped(tmp_path_factory, monkeypatch):
  """Scripts behave as if no heads came with the package, whatever lies there."""
  monkeypatch.setattr(shipped, "FOLDER", str(tmp_path_factory.mktemp("shipped")))
