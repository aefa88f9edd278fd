"""Pictures made into tensors in a thread, while the model trains on those before them.

Reading, decoding and resampling a video takes a second or more; torch and the decoders let other
threads run meanwhile. What nobody has begun when it is wanted is made by who wants it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from threading import Condition, Thread, main_thread

from torch import Tensor

Made = dict[str, Tensor]


class PicturesAhead:
    """Makes what is shown next, in its order, as far as there is room for it."""

    def __init__(self, make: Callable[[str], Made], most_bytes: int) -> None:
        """Wait for `begin`.

        Args:
            make: tensors of a reference; called in another thread, and may raise.
            most_bytes: of tensors that wait to be taken; what is under way comes on top.
        """
        self._make = make
        self._room = most_bytes
        self._queue: deque[str] = deque()
        self._under_way: str | None = None
        self._made: dict[str, Made] = {}
        self._changed = Condition()
        self._thread: Thread | None = None

    def begin(self, references: Iterable[str]) -> None:
        """Make these from now on, and forget what was made of others."""
        wanted = list(dict.fromkeys(references))
        with self._changed:
            for reference in self._made.keys() - wanted:
                self._room += num_bytes(self._made.pop(reference))
            known = {*self._made, self._under_way}
            self._queue = deque(each for each in wanted if each not in known)
            self._go_on()

    def take(self, reference: str) -> Made | None:
        """Return what was made of a reference; ``None`` if nothing was, or it could not be.

        Waits for the one that is under way. Whoever gets none makes it, and learns what is wrong.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._under_way != reference)
            if reference in self._queue:
                self._queue.remove(reference)
            made = self._made.pop(reference, None)
            if made is not None:
                self._room += num_bytes(made)
                self._go_on()
            return made

    def _go_on(self) -> None:
        """Have a thread if there is something to do; it ends when there is not."""
        if self._thread is None and self._queue and self._room > 0:
            self._thread = Thread(target=self._work, name="pictures")
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                # a process that ends waits for the picture under way and no further
                is_over = not main_thread().is_alive()
                if is_over or not self._queue or self._room <= 0:
                    self._thread = None
                    return
                reference = self._under_way = self._queue.popleft()
            made = self._tried(reference)
            with self._changed:
                self._under_way = None
                if made is not None:
                    self._made[reference] = made
                    self._room -= num_bytes(made)
                self._changed.notify_all()

    def _tried(self, reference: str) -> Made | None:
        try:
            return self._make(reference)
        except Exception:  # noqa: BLE001 - raised where it is taken, by making it again
            return None


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of tensors together."""
    return sum(tensor.nbytes for tensor in tensors.values())
