"""One typed RPC between a node and its worker processes: engines, environments, DiLoCo.

`client` is the node's side: `open_remote` runs ``python -m`` a module as a child, calls its
methods, and starts another when it has died. `server` is the worker's side: `serve` answers
calls with the methods of an object. `calls` is what crosses the pipe, `files` what is too large
for it: records in a file of a scratch folder, which the other side maps.

A server, ``mine/worker.py``; the class names each method that may be called::

    class Sums:
        def configure(self, factor: int) -> str:
            self._factor = factor
            return "ready"

        def total(self, file: list[Any], answer: str) -> RecordFile:
            columns = MappedRecords(RecordFile(*file), lambda data: np.frombuffer(data, "<f4"))
            total = self._factor * sum(columns)
            return write_records(answer, [total.tobytes()])

    if __name__ == "__main__":
        serve(Sums())

and its caller::

    scratch = Scratch(world, "sums")  # a folder of the node's disk
    async with open_remote(
        world, ("mine.worker",), name="sums", raises=(StorageError,), otherwise=EngineError
    ) as remote:
        await remote.start("configure", 2)  # repeated in each process that replaces this one
        async with scratch.files([one.tobytes() for one in columns]) as (answer, [file]):
            written = await remote.call("total", file, answer)
            (total,) = await scratch.read(written, lambda data: np.frombuffer(data, "<f4"))

Arguments and values are what msgpack has: None, bool, int, float, str, bytes, lists and tables;
tuples arrive as lists. What a method raises is raised again by `Remote.call`, as its own class
if that is among ``raises``, else as ``otherwise``. A disk that takes no data raises
`StorageError` in the worker: put it among ``raises``, and let `roles.shared.durable.Durable`
repeat the call. A reply from a process that runs a stranger's code is read by an
``_untrusted`` parser: pass ``read``.
"""
