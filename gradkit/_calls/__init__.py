"""One record an operation: what it takes, what it gives, and how both fit together.

``rows`` and ``channels`` have the records of the norms; ``roles`` says what an argument can be,
``record`` what all records share, and ``layouts`` and ``list_layouts`` how shapes and dtypes fit.
"""
