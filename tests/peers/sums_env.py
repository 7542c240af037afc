"""An environment as users of verifiers write it: a taskset, and a harness that asks twice, in this process."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

SEEN: list[list[str]] = []
"""What the policy said in each finished episode, as its trace has it."""


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def odd(self, trace: vf.Trace) -> float:
        said = [str(message.content or "") for message in trace.assistant_messages]
        SEEN.append(said)
        return float(len("".join(said)) % 2)


class SumsConfig(vf.TasksetConfig):
    endless: bool = False


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def __init__(self, config: SumsConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self) -> Iterator[SumTask]:
        for n in range(8):
            yield SumTask(SumData(prompt=f"What is {n} + {n}?", system_prompt="Be brief.", answer=str(2 * n)))


class TwiceConfig(vf.HarnessConfig):
    question: str = "Sure?"
    fail: bool = False
    forget: bool = False
    """Whether the second request leaves out the first answer, so that the trace branches."""


class Twice(vf.Harness[TwiceConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        if self.config.fail:
            raise RuntimeError("the program is broken")
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                if self.config.forget:
                    messages = [*messages[:2], {"role": "user", "content": self.config.question}]
                    continue
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                messages.append({"role": "user", "content": self.config.question})
        return vf.ProgramResult(0, "", "")


__all__ = ["Sums", "Twice"]
