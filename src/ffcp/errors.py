"""The warning class of the library: filter on it to silence or to enforce."""


class FFCPWarning(UserWarning):
    """Something about a band that its reader should know: infinite, or no better than CP."""
