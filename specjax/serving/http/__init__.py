"""The HTTP front: OpenAI's completions and chat completions over an `Engine`.

`schema` says what may be asked, `replies` what is answered, `metrics` what is counted; `runner` steps the
engine in a thread. Only `app` needs starlette and `server` uvicorn: the extra ``serve``.
"""
