"""An environment of verifiers: sums, for an agent of one question."""

import httpx
import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.split("####")[-1].strip() == self.data.answer)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a in range(100, 1000, 7):
            for b in range(103, 1000, 97):
                yield SumTask(Sum(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


class Ask(vf.Harness):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        key = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=key)
        return vf.ProgramResult(exit_code=answer.is_error, stdout=answer.text, stderr="")


__all__ = ["Sums", "Ask"]
