"""Starting what an actor works with: task, engine, puller, client. The one place that wires real ones."""

from __future__ import annotations

from actors.engine import Engine
from actors.spec import ActorSpec, Parts
from actors.tasks import Task, load_task
from actors.tasks.encode import PromptCodec
from actors.threads import DaemonThreads
from buffer.sharded import open_client
from common.staleness import PolicyVersion
from weight_sync.puller import Puller, open_puller


async def assemble(spec: ActorSpec) -> Parts:
    """Start the parts, the cheap and error-prone ones first; on failure stop what was started.

    Raises:
        TaskError: the task or tokenizer is not as the configuration says.
        EngineDead: the engine does not start.
        BufferError: the buffer does not answer, or refuses this run.
        TransferFailed: neither the weights folder nor the weight service can be reached.
    """
    threads = DaemonThreads(f"{spec.name}-start", max_threads=2)
    task, codec = await threads.run(_load, spec)
    puller = await threads.run(_open_puller, spec)
    client = open_client(
        spec.buffer_addresses, run_id=spec.run_id, role="actor", name=spec.name, config=spec.buffer, keys=spec.keys
    )
    try:
        engine = await Engine.start(
            spec.serving_model_path,
            spec.config,
            version=PolicyVersion(0, 0),
            seed=spec.seed + spec.index,
        )
        try:
            # Greeted last: from here on an older process of this name is fenced.
            await threads.run(client.connect)
        except BaseException:
            await engine.stop()
            raise
    except BaseException:
        await threads.run(client.close)
        await threads.run(puller.close)
        raise
    finally:
        threads.close()
    return Parts(task, codec, engine, puller, client)


def _open_puller(spec: ActorSpec) -> Puller:
    return open_puller(
        spec.weight_sync,
        folder=spec.weights_folder,
        address=spec.weights_address,
        run_id=spec.run_id,
        name=spec.name,
        dtype=spec.config.dtype,
        keys=spec.keys,
    )


def _load(spec: ActorSpec) -> tuple[Task, PromptCodec]:
    codec = PromptCodec(spec.tokenizer_path, spec.task.chat, spec.task.system_prompt)
    return load_task(spec.task).encoded(codec.encode, spec.config.max_prompt_tokens), codec
