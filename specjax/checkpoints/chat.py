"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from specjax.checkpoints.files import CheckpointError


def render(
  template: str,
  messages: Sequence[Mapping[str, Any]],
  *,
  add_generation_prompt: bool,
  variables: Mapping[str, Any],
) -> str:
  """Renders a chat template in a sandbox.

  Args:
    template: Jinja source.
    messages: ``{"role": …, "content": …}`` in order.
    add_generation_prompt: end with the opening of the assistant's turn.
    variables: further names the template may use (``bos_token`` and the like).

  Raises:
    CheckpointError: the template is not valid, or it refuses the messages.
  """
  try:
    return _compile(template).render(
      messages=list(messages),
      add_generation_prompt=add_generation_prompt,
      tools=None,
      documents=None,
      **variables,
    )
  except jinja2.TemplateSyntaxError as error:
    raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from None
  except jinja2.TemplateError as error:
    raise CheckpointError(f"chat template: {error.message or type(error).__name__}") from None


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  return environment.from_string(template)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  # Jinja's own filter escapes HTML.
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise_exception(message: str):
  raise jinja2.TemplateError(message)
