"""Packaging of specjax.

Lower bounds are the versions the whole test suite passed on; nothing older is claimed. (Kernels and the
loop also ran on jax 0.8.0 with flax 0.12.0; saving checkpoints did not.)
"""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "specjax" / "__init__.py").read_text())[1]

TORCH = "torch>=2.13"
SERVE = ["starlette>=1.10", "uvicorn>=0.54"]
PARITY = [TORCH, "transformers>=5.24"]

setuptools.setup(
  name="specjax",
  version=VERSION,
  description="Speculative decoding for JAX on CPU, GPU and TPU",
  long_description=(HERE / "README.md").read_text(),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  packages=setuptools.find_packages(include=["specjax", "specjax.*", "experiments", "experiments.*"]),
  package_data={
    "experiments": ["*.jsonl", "*.ipynb"],
    "specjax.checkpoints": ["shipped/**/*"],
    "specjax.kernels.tree_attention": ["tiles/*.json"],
    "specjax.training": ["openings.txt"],
  },
  python_requires=">=3.11",
  install_requires=[
    "absl-py>=2.5",
    "flax>=0.12.8",
    "gguf>=0.19",
    "jax>=0.10.2",
    "jinja2>=3.1.6",
    "numpy>=2.4",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "safetensors>=0.8",
    "tokenizers>=0.23",
    "tqdm>=4.70",
  ],
  extras_require={
    "hub": ["huggingface_hub>=2.4"],
    "parity": PARITY,
    # `experiments.serve`: the HTTP front.
    "serve": SERVE,
    # The official client is the oracle for the HTTP front, Prometheus's parser the one for its metrics.
    "test": [
      *SERVE,
      "httpx>=0.28",
      "hypothesis>=6.170",
      "matplotlib>=3.11",
      "openai>=3.57",
      "prometheus-client>=0.26",
      "pytest>=9.2",
      "pytest-xdist>=3.8",
      "ruff>=0.17.6",
    ],
    # Reading heads that were saved as PyTorch's own files (medusa_lm_head.pt, pytorch_model.bin).
    "torch": [TORCH],
    "tpu": ["jax[tpu]"],
    "cuda13": ["jax[cuda13]"],
    # Compilers for devices that are not there (`experiments.compile_kernels`): libtpu, XLA's CUDA backend,
    # and, for machines without a CUDA toolkit, ptxas with the device library.
    "kernels": ["jax[tpu,cuda13-local]", "nvidia-cuda-nvcc>=13.0.48", "nvidia-nvvm>=13.0.48"],
    "plot": ["matplotlib>=3.11"],
    # `python -m tests.notebook --here` executes the notebook in an environment that is there.
    "notebook": ["ipykernel>=7.4", "matplotlib>=3.11", "nbclient>=0.11", "nbformat>=5.11"],
    # `experiments.train_drafter --tensorboard`: clu writes with TensorFlow.
    "tensorboard": ["clu>=0.0.12", "tensorflow-cpu>=2.21"],
  },
  classifiers=[
    "License :: OSI Approved :: Apache Software License",
    "Programming Language :: Python :: 3",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
  ],
)
