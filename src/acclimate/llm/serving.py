"""transformers' own HTTP server, with one model that acclimate has loaded.

The application, its handlers and what they answer are those of ``transformers serve``. Its constructors take
what differs here: a model manager that has this model, and a generation manager that runs several requests at
once and ends one whose client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2.exceptions import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _GenerationCancelled,
)

from acclimate.errors import AcclimateError
from acclimate.llm.decode.batching import batched_with_others
from acclimate.llm.decode.loop import LARGEST_BATCH, step_kind
from acclimate.llm.generation import end_tokens
from acclimate.llm.quiet import first_line, quiet_transformers
from acclimate.llm.read_tokens import RemembersTexts

if TYPE_CHECKING:
    from acclimate.llm.loading.loaded_model import LoadedModel


class _OneModel(ModelManager):  # type: ignore[misc]
    """A model manager of transformers that has one model, and loads and unloads none."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self._pair = model, tokenizer
        self._created = int(time.time())
        super().__init__(force_model=name)

    def load_model_and_processor(
        self,
        model_id_and_revision: str,
        progress_callback: Callable[[dict[str, Any]], None] | None = None,
        tqdm_class: type | None = None,
        gguf_file: str | None = None,
    ) -> tuple[Any, Any]:
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": self.force_model, "cached": True})
        return self._pair

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Returns the name as it is: a model in a folder has no revision."""
        return model_id

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [
            {"id": self.force_model, "object": "model", "owned_by": "acclimate", "created": self._created}
        ]


class _GenerateManager(GenerateManager):  # type: ignore[misc]
    """Runs up to ``at_once`` requests in a thread of its own each; their texts take steps together.

    A prompt and its continuation have at most ``context_length`` tokens; ``None``: no limit.
    """

    def __init__(self, at_once: int, context_length: int | None) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(at_once, "request")
        self._context_length = context_length

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        """Starts a text; returns the queue of its pieces and what cancels it."""
        self._limit(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        """Returns a whole text; ends it if the request is cancelled."""
        self._limit(inputs, gen_config)
        # Nobody reads its queue: only `cancel` is of use here.
        streamer = DirectStreamer(processor._tokenizer, asyncio.get_running_loop(), asyncio.Queue())
        try:
            made: tuple[str, int, Any] = await super().generate_non_streaming(
                model, processor, {**inputs, "streamer": streamer}, gen_config, request_id
            )
            return made
        except asyncio.CancelledError:
            streamer.cancel()
            raise

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(_called, fn, *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def stop(self) -> None:
        """Ends the threads, once their texts have ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _limit(self, inputs: Any, gen_config: Any) -> None:
        """Refuses a prompt that fills the model's context; makes a text end where the context does."""
        if self._context_length is None:
            return
        length = inputs["input_ids"].shape[-1]
        room = self._context_length - length
        if room < 1:
            raise HTTPException(
                400,
                f"The prompt has {length} tokens, and the model's context is {self._context_length}, which "
                "leaves no room for an answer.",
            )
        if gen_config.max_new_tokens is not None:
            gen_config.max_new_tokens = min(gen_config.max_new_tokens, room)


def _called(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with batched_with_others():
        return fn(*args, **kwargs)


class _GenerationState(GenerationState):  # type: ignore[misc]
    """transformers' generation state with our generation manager."""

    def __init__(self, manager: _GenerateManager) -> None:
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return self._manager

    def shutdown(self) -> None:
        super().shutdown()
        self._manager.stop()


class _CancelsRequests:
    """An ASGI application that ends a request of another one as soon as its client has gone.

    Without it, a request that does not stream would be computed to its end. An answer that the server cancels
    after Ctrl-C ends where it is.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages: asyncio.Queue[Any] = asyncio.Queue()
        is_begun = is_whole = is_cut = False

        async def tell(message: Any) -> None:
            nonlocal is_begun, is_whole
            is_begun = True
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, messages.get, tell))

        async def listen() -> None:
            while True:
                message = await receive()
                messages.put_nowait(message)
                if message["type"] == "http.disconnect":
                    return

        listening = asyncio.ensure_future(listen())
        try:
            await asyncio.wait({answering, listening}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            is_cut = True
        finally:
            listening.cancel()
            if not answering.done():
                answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
        if is_cut and not is_begun:
            await send({"type": "http.response.start", "status": 503, "headers": []})
        if is_cut and not is_whole:  # else uvicorn would show a traceback
            await send({"type": "http.response.body", "body": b""})


def server_tokenizer(loaded: LoadedModel, template: str | None, *, trust_remote_code: bool) -> Any:
    """Returns transformers' tokenizer for a model, in whose settings it writes the ends of texts."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(
            loaded.folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    if template is not None:
        tokenizer.chat_template = template
    ends, settings = end_tokens(loaded), loaded.module.generation_config
    if ends:
        settings.eos_token_id, settings.pad_token_id = ends, ends[0]
    return tokenizer


def requests_at_once(model: Any) -> int:
    """Returns how many texts to generate at once: several, if they can take their steps together."""
    return LARGEST_BATCH if model.model_ranks.size == 1 and step_kind(model) == "native" else 1


def build_app(model: Any, tokenizer: Any, name: str, context_length: int | None, at_once: int) -> Any:
    """Returns transformers' application with one model, from ``init_inference`` or with its ``generate``.

    At most ``at_once`` requests run at once, each of up to ``context_length`` tokens; ``None``: no limit.
    """
    if model.model_ranks.size == 1:  # ranks would have to agree on what they keep
        model = RemembersTexts(model, _GenerationCancelled)
    manager = _OneModel(model, tokenizer, name)
    state = _GenerationState(_GenerateManager(at_once, context_length))
    app = build_server(
        manager,
        ChatCompletionHandler(model_manager=manager, generation_state=state),
        completion_handler=CompletionHandler(model_manager=manager, generation_state=state),
        response_handler=ResponseHandler(model_manager=manager, generation_state=state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(model_manager=manager, generation_state=state),
        generation_state=state,
    )
    # ImportError: a route of transformers' needs a package that is not installed.
    theirs = (StarletteHTTPException, RequestValidationError, TemplateError)
    for kind in (*theirs, AcclimateError, ValueError, KeyError, TypeError, ImportError):
        app.add_exception_handler(kind, _refused)
    return _CancelsRequests(app)


async def _refused(request: Any, error: Exception) -> JSONResponse:
    """Answers a request that transformers cannot use, such as messages for a model without a template.

    The body is as OpenAI's clients expect it, so that they show the message.
    """
    status, message = 400, first_line(error)
    if isinstance(error, StarletteHTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        message = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
    elif isinstance(error, KeyError):
        message = f"the request lacks {error}"
    told = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": told}, status)
