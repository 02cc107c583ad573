"""Our patches to installed SGLang versions: what they change, and putting them in and taking them out."""
