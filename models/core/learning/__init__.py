"""The loops that train drafts and language models, what they are fed, and what they keep."""
