"""What `import torch` calls at its end, through the entry point group `torch.backends`.

It is not part of the package `fsdp_skip1`, because importing that package is what turns the plugin
on. Every process of every job with the plugin installed comes through here, so it imports nothing
that the interpreter has not loaded already, and it never raises: an exception here would make
`import torch` fail.
"""

import os

VARIABLE = "FSDP_SKIP1"
ON = ("1", "true", "on", "yes")
OFF = ("0", "false", "off", "no")

# Values already complained about, so that the package does not repeat what was said here.
complained: set[str] = set()


def reading(value: str | None) -> bool | None:
    """What a value of FSDP_SKIP1 asks for: True, False, or None when it asks for nothing."""
    word = (value or "").strip().lower()
    if word in ON:
        return True
    if word in OFF:
        return False
    return None


def complaint(value: str | None) -> str | None:
    """The warning that a value deserves, once a process; None when it deserves none."""
    word = (value or "").strip()
    if not word or reading(word) is not None or word in complained:
        return None
    complained.add(word)
    return (
        f"{VARIABLE}={word!r} is ignored: it takes 1, true, on or yes to turn fsdp_skip1 on, "
        "and 0, false, off or no to keep it off"
    )


def autoload() -> None:
    """Turn the plugin on if the variable FSDP_SKIP1 asks for it. Returns None and never raises."""
    try:
        value = os.environ.get(VARIABLE)
        if not value:
            return
        if reading(value):
            import fsdp_skip1  # noqa: F401  (importing it is what turns it on)
        else:
            message = complaint(value)
            if message:
                _warn(message)
    except Exception as error:
        _warn(f"fsdp_skip1 could not be loaded, torch runs unchanged: {error!r}")


def _warn(message: str) -> None:
    # The package's own warning class would have to be imported from the package.
    try:
        import warnings

        warnings.warn(message, UserWarning, stacklevel=3)
    except Exception:
        # `-W error`, or a broken replacement of showwarning: say it without the warnings module.
        try:
            import logging

            logging.getLogger("fsdp_skip1").warning("%s", message)
        except Exception:
            pass
