# SPDX-License-Identifier: MIT
"""Text from the trained model: byte by byte through `generate`, with the recurrent state as its only memory."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class Speech:
    """The generated text (without the prompt) and what it cost."""

    prompt: str
    text: str
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class ByteStreamer(BaseStreamer):
    """Hands text on as soon as its bytes form whole characters. The prompt comes first and is not counted."""

    def __init__(self, write: Callable[[str], None], should_stop: Callable[[], bool]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._write = write
        self._should_stop = should_stop
        self._at_prompt = True
        self.text = ""
        self.tokens = 0

    def put(self, value: torch.Tensor) -> None:
        piece = self._decoder.decode(bytes(value.flatten().tolist()))
        self._write(piece)
        if self._at_prompt:
            self._at_prompt = False
            return
        self.text += piece
        self.tokens += 1
        if self._should_stop():
            raise KeyboardInterrupt

    def end(self) -> None:
        self._write(self._decoder.decode(b"", final=True))


def speak(
    model: Any,
    prompt: str,
    *,
    tokens: int,
    seed: int,
    temperature: float,
    write: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> Speech:
    """Continue `prompt` by up to `tokens` bytes, writing text as it comes.

    Stops early at an end-of-file byte or when `should_stop()` turns true.
    """
    device = next(model.parameters()).device
    data = prompt.encode() or b"\n"
    streamer = ByteStreamer(write, should_stop)
    torch.manual_seed(seed)
    model.eval()
    start = time.perf_counter()
    try:
        model.generate(
            torch.tensor([list(data)], device=device),
            attention_mask=torch.ones(1, len(data), dtype=torch.long, device=device),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=temperature,
            top_k=40,
            pad_token_id=model.config.eos_token_id,
            streamer=streamer,
        )
    except KeyboardInterrupt:
        streamer.end()
    return Speech(prompt, streamer.text, streamer.tokens, time.perf_counter() - start)
