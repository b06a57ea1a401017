"""The Hugging Face Hub: which errors a download raises."""


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the base classes of the Hub's errors and of those of its HTTP client, such as a connection that breaks off, which are no OSErrors."""
    from huggingface_hub.errors import HTTPError  # 0.3 s, needed here only

    return OSError, HTTPError
