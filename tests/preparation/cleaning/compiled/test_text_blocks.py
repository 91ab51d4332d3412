"""What is compiled is kept on disk for the sources that it was made of."""

from pathlib import Path

from pretrain.preparation.cleaning.compiled import c4, item_index, text_blocks
from pretrain.preparation.cleaning.compiled.text_blocks import CACHE_FOLDER, sources_digest


def test_machine_code_is_kept_for_the_sources_of_all_modules(tmp_path):
    """numba compares the source of a function's own module: of another's it would go on with what it had inlined."""
    assert CACHE_FOLDER.name == sources_digest(Path(text_blocks.__file__).parent)
    for function in (c4.clean_lines, item_index._find):
        assert CACHE_FOLDER in Path(function.stats.cache_path).parents
    (tmp_path / "a.py").write_text("A = 1\n")
    (tmp_path / "b.py").write_text("B = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "b.py").write_text("B = 2\n")
    assert sources_digest(tmp_path) != before
