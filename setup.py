"""Packaging of specjax. Lower bounds are the oldest versions the test suite passed on."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "specjax" / "__init__.py").read_text())[1]

PARITY = ["torch>=2.6", "transformers>=5.0"]

setuptools.setup(
  name="specjax",
  version=VERSION,
  description="Speculative decoding for JAX on CPU, GPU and TPU",
  long_description=(HERE / "README.md").read_text(),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  packages=setuptools.find_packages(include=["specjax", "specjax.*", "experiments", "experiments.*"]),
  package_data={"experiments": ["*.jsonl"]},
  python_requires=">=3.11",
  install_requires=[
    "absl-py>=2.1",
    "flax>=0.12.0",
    "gguf>=0.17",
    "jax>=0.8.0",
    "jinja2>=3.1",
    "numpy>=2.0",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.11.20",
    "safetensors>=0.5",
    "tokenizers>=0.21",
    "tqdm>=4.66",
  ],
  extras_require={
    "hub": ["huggingface_hub>=0.30"],
    "parity": PARITY,
    "test": ["hypothesis>=6.100", "pytest>=8.0", "ruff>=0.12"],
    "tpu": ["jax[tpu]"],
    "cuda13": ["jax[cuda13]"],
  },
  classifiers=[
    "License :: OSI Approved :: Apache Software License",
    "Programming Language :: Python :: 3",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
  ],
)
