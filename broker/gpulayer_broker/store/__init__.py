"""The content-addressed store: manifests of trees, bundles of sources, and where their bytes lie."""
