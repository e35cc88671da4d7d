"""The engine's outside: one object around vLLM's AsyncLLM."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import vllm
from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import VLLMError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from models.core.drafting.draft_families import family_of, require_family
from models.core.layers.kernels import fast_dtype
from models.drafts import EngineWeights
from models.engines import Completion, OnFirstToken, Sampling
from models.engines.vllm import Params
from models.engines.vllm.capture import Claim
from models.engines.vllm.fields import DraftOptions, Setup
from models.engines.vllm.launch import Speculation, launch
from models.engines.vllm.measuring import Mode, Times, measured_for, mode_of, place_of
from models.engines.vllm.redraft_vllm import file_digest
from models.engines.vllm.redraft_vllm.swapper import MOST_CHARS, Broken, Order, Refused, Swapper
from models.engines.vllm.tap import InstrumentedLLM

# Largest relative error of a draft module against its file: bfloat16 keeps 8 bits and stays well below, another matrix
# is near 1.
TOLERANCE = 0.05

log = logging.getLogger(__name__)


class VllmEngine:
    """A target and its draft, running.

    Whoever serves says at `llm` what is to be told; vLLM's OpenAI handlers are built over it, and configured by `args`,
    which it was made by. Without a `setup` vLLM drafts the same number of tokens in each step.
    """

    unplanned: str = ""  # why; "" where steps are planned or nothing is drafted
    vllm_drafts: bool = False  # by itself, in its own worker; switched off, it drafts on, and none of it is verified

    def __init__(
        self,
        llm: InstrumentedLLM,
        args: AsyncEngineArgs,
        draft: Path | None,
        setup: Setup | None,
        mode: Mode,
        times: Times,
    ) -> None:
        self.llm, self.args, self.draft, self.setup, self.mode, self.times = llm, args, draft, setup, mode, times
        self._swapper = Swapper(llm, tolerance=TOLERANCE)

    @classmethod
    async def start(
        cls,
        target: Path,
        draft: Path | None,
        params: Params,
        served_name: str = "target",
        draft_version: str = "",
        costs: Path | None = None,
        serves: bool = False,
        captures: bool = False,
    ) -> "VllmEngine":
        """Start the engine's processes and load both models; without a draft it can't speculate.

        The folder `costs` keeps what steps take over restarts; `serves` is as in `mode_of`, and `captures` says whether
        `capture_states` will be called.

        Raises:
            ValueError: a directory can't be loaded, vLLM can't draft with the draft or only another number of tokens,
                or it is asked for a model runner that is not supported.
        """
        dtype, on_gpu = str(params.dtype), not current_platform.is_cpu()
        if dtype == "auto":
            dtype = str(fast_dtype("cuda" if on_gpu else "cpu")).removeprefix("torch.")
        place = place_of(params, current_platform.get_device_name())
        holds = {
            eager: measured_for(target, None, dtype, eager, vllm.__version__, place=place) for eager in (True, False)
        }
        times = Times(costs, holds)
        mode = mode_of(params, target, dtype, serves, times)
        wanted = Speculation(target, draft, params, dtype, mode.eager, costs, captures, "", place, on_gpu)
        engine = await cls._launch(wanted, served_name, draft_version, mode, times)
        if engine.setup is None:
            return engine
        try:
            await engine._call("follow_plans")
        except ValueError as error:
            log.warning("each step drafts %d tokens and nothing is looked up: %s", params.num_draft_tokens, error)
            await engine.close()
            engine = await cls._launch(wanted._replace(unplanned=str(error)), served_name, draft_version, mode, times)
        except BaseException:
            await engine.close()
            raise
        return engine

    @classmethod
    async def _launch(
        cls, wanted: Speculation, served_name: str, draft_version: str, mode: Mode, times: Times
    ) -> "VllmEngine":
        llm, args, setup = launch(wanted, served_name, draft_version)
        engine = cls(llm, args, wanted.draft, setup, mode, times)
        engine.unplanned = wanted.why_unplanned() if setup is None else ""
        engine.vllm_drafts = wanted.vllm_drafts
        if wanted.vllm_drafts:
            return engine
        try:
            log.info("vLLM's model runner is V1, %s", await engine._call("runner"))
            if num_rows := await engine._call("small_batch_limit"):
                why = f"{mode.why}; products of up to {num_rows} generated rows read the few bits of the target's file"
                engine.mode = mode._replace(why=why)
            if wanted.params.batch_invariant:
                await engine._call("require_batch_invariant")
                engine.mode = engine.mode._replace(why=f"{engine.mode.why}; batch invariant")
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def draft_version(self) -> str:
        """What the loaded draft is called."""
        return self.llm.draft_version

    @property
    def speculating(self) -> bool:
        """Whether steps are drafted."""
        return self.llm.speculating

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, request_id: str, on_first_token: OnFirstToken | None = None
    ) -> Completion:
        """See `models.engines.Engine`. For callers in this process; HTTP's requests reach `llm` through `openai`."""
        wanted = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            logprobs=sampling.num_logprobs,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=list(sampling.stop_ids),
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": list(prompt_ids)}
        draft_options = DraftOptions(sampling.drafting, piece=sampling.piece)
        async for output in self.llm.generate(prompt, wanted, request_id, draft_options, priority=sampling.priority):
            last: Any = output
            if on_first_token is not None:
                on_first_token()
                on_first_token = None
        return cast("Completion", last.completion)

    async def swap_draft(self, directory: Path, version: str) -> float:
        """See `models.engines.Engine`; RuntimeError if it is not known what the engine drafts with.

        It is read and checked before, while the engine runs its steps. The prefix cache is forgotten, because it holds
        the keys of the draft before. The engine takes what it is sent in order: a request that is sent after the swap
        is drafted by the new draft and labelled so, also where the caller no longer waits.
        """
        started = time.monotonic()
        if self.draft is None:
            raise ValueError("this engine was started without a draft")
        require_family(directory, self.draft)
        family = family_of(directory)
        weights, before = family.vllm_weights(directory), (self.llm.draft_version, self.draft)
        if weights is None and family.vllm_config(directory) != family.vllm_config(self.draft):
            raise ValueError(f"draft {directory.name} is set otherwise than the served one; a swap can't change it")
        async with self._swapping():
            order = None if weights is None else await asyncio.to_thread(_order, weights, version)
            if order is not None:
                await self._swapper.stage(order)
            self.llm.draft_version, self.draft = version, directory
            self.llm.num_swaps += 1
            self.llm.speeds.clear()  # of the draft before
            try:
                if order is not None:
                    await self._swapper.commit(order)
            except Refused:
                self.llm.draft_version, self.draft = before
                raise
        await self.llm.update_weight_version(version)
        return 1000 * (time.monotonic() - started)

    async def check_draft(self, directory: Path) -> float:
        """See `models.engines.Engine`."""
        if (weights := family_of(directory).vllm_weights(directory)) is None:
            return 0.0
        async with self._swapping():
            order = await asyncio.to_thread(_order, weights, f"check of {directory.name}"[:MOST_CHARS])
            await self._swapper.stage(order)
            try:
                return await self._swapper.verify(order, staged=True)
            finally:
                await self._swapper.discard()

    async def capture_states(self, max_bytes: int) -> int:
        """Hold hidden states of accepted tokens for requests whose `DraftOptions` want it, in so much memory at most.

        Returns how many values a token has; ValueError if those of the target's last layer can't be had, as where the
        engine was started without `captures`, or nothing is planned.
        """
        if self.setup is None:
            raise ValueError(f"vLLM's own proposer is handed rejected tokens too, and {self.unplanned}")
        return int(await self._call("capture_states", max_bytes))

    async def settle_states(self, claims: Sequence[Claim]) -> dict[str, int]:
        """Have the states of requests that have ended written or dropped; return what became of all so far, by why."""
        return dict(await self._call("settle_states", list(claims)))

    async def set_speculation(self, on: bool) -> None:
        """See `models.engines.Engine`; off costs nothing, on forgets the prefix cache, which may lack the draft's keys.

        Where vLLM drafts by itself, it does so for requests that begin later, and both costs what it did.
        """
        if on and self.draft is None:
            raise ValueError("speculation can't be switched on: the engine was started without a draft")
        self.llm.undrafted = self.vllm_drafts and not on
        if self.draft is not None and not self.vllm_drafts:
            await self._call("set_speculation", on)
            if on and not self.speculating:
                await self.llm.reset_prefix_cache()
        self.llm.speculating = on

    async def forget_answers(self) -> int:
        """Forget recent answers and the prefix cache; return how many tokens of answers look-up held."""
        num_tokens: int = 0 if self.vllm_drafts else await self._call("forget_answers")
        await self.llm.reset_prefix_cache()
        return num_tokens

    async def health(self) -> None:
        """Raise RuntimeError when the target can't serve."""
        try:
            await self.llm.check_health()
        except VLLMError as error:  # vLLM's own classes don't unpickle where vLLM is not imported
            raise RuntimeError(f"the engine is dead: {error}") from None

    async def close(self) -> None:
        """End the engine's processes."""
        if self.llm.grammars is not None:
            self.llm.grammars.close()
        self.llm.shutdown()

    @asynccontextmanager
    async def _swapping(self) -> AsyncIterator[None]:
        """Use the swapper alone, and raise what it raises as this class says."""
        try:
            async with self._swapper.lock:
                yield
        except Refused as error:
            raise ValueError(str(error)) from error
        except Broken as error:
            raise RuntimeError(str(error)) from error

    async def _call(self, method: str, *args: object) -> Any:
        """Run a worker's method between two steps; ValueError if the worker refused."""
        answer: dict[str, Any] = (await self.llm.collective_rpc(method, args=args))[0]
        if "refused" in answer:
            raise ValueError(answer["refused"])
        return answer["value"]


def _order(weights: EngineWeights, version: str) -> Order:
    """Return what the swapper is told of a file, which is read for its sum."""
    digest, parameters = file_digest(weights.file), {name: list(parts) for name, parts in weights.parameters.items()}
    return Order(version=version, path=str(weights.file.parent), sha256=digest, parameters=parameters)
