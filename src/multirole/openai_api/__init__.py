"""Play workflows that are written for OpenAI's API: an endpoint in this process, where `model` names the role."""
