"""The error of a step that cannot go on."""


class ReleaseError(RuntimeError):
    """A released training step is not in a state to go on; the message names the cause and the fix."""
