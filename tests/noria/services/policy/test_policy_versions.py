import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from noria.contracts.errors import InvalidRecord, NotFound, PolicyUnavailable
from noria.services.policy.versions import Version, Versions


@pytest.fixture
def folders(model_dir: Path, tmp_path: Path) -> dict[str, Path]:
    """Versions a, b, c, d in folders of their own, and `alias`, a link to a."""
    found = {name: tmp_path / name for name in "abcd"}
    for path in found.values():
        shutil.copytree(model_dir, path)
    (tmp_path / "alias").symlink_to(tmp_path / "a")
    return {**found, "alias": tmp_path / "alias"}


async def use(versions: Versions, name: str) -> Version:
    async with versions.lease(name) as version:
        return version


async def test_names_of_one_folder_share_one_model(folders: dict[str, Path]) -> None:
    versions = Versions(folders.__getitem__, capacity=4)
    first, again = await asyncio.gather(use(versions, "a"), use(versions, "alias"))
    assert first is again
    assert set(versions.loaded) == {"a", "alias"}
    versions.close()


async def test_the_least_recently_used_goes_first(folders: dict[str, Path]) -> None:
    versions = Versions(folders.__getitem__, capacity=2)
    first = await use(versions, "a")
    await use(versions, "b")
    assert await use(versions, "a") is first
    await use(versions, "c")
    assert set(versions.loaded) == {"a", "c"}
    assert await use(versions, "a") is first
    versions.close()


async def test_what_is_in_use_stays(folders: dict[str, Path]) -> None:
    versions = Versions(folders.__getitem__, capacity=1)
    async with versions.lease("a") as first:
        await use(versions, "b")
        await use(versions, "c")
        assert await use(versions, "a") is first
        assert "a" in versions.loaded
    await use(versions, "d")
    assert set(versions.loaded) == {"d"}
    versions.close()


async def test_a_waiter_that_leaves_does_not_stop_the_load(folders: dict[str, Path]) -> None:
    versions = Versions(folders.__getitem__, capacity=2)
    impatient = asyncio.create_task(use(versions, "a"))
    patient = asyncio.create_task(use(versions, "a"))
    await asyncio.sleep(0.001)
    impatient.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await impatient
    assert (await patient).path == folders["a"].resolve()
    versions.close()


async def test_the_loop_runs_on_while_a_version_loads(folders: dict[str, Path]) -> None:
    versions = Versions(folders.__getitem__, capacity=2)
    load = asyncio.create_task(use(versions, "a"))
    beats = 0
    while not load.done():
        await asyncio.sleep(0.001)
        beats += 1
    assert beats >= 3
    versions.close()


async def test_a_missing_version_is_found_once_it_is_there(folders: dict[str, Path], model_dir: Path) -> None:
    versions = Versions(folders.__getitem__, capacity=2)
    shutil.rmtree(folders["b"])
    with pytest.raises(NotFound, match="no folder"):
        await use(versions, "b")
    folders["b"].mkdir()
    with pytest.raises(PolicyUnavailable, match="cannot be loaded"):
        await use(versions, "b")
    shutil.copytree(model_dir, folders["b"], dirs_exist_ok=True)
    assert (await use(versions, "b")).path == folders["b"].resolve()
    versions.close()


def test_a_version_knows_its_end_tokens_and_context(version: Version) -> None:
    assert version.eos_ids == {version.tokenizer.eos_token_id}
    assert version.context == 2048
    assert version.batchable


def test_a_tokenizer_without_template_is_refused(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").unlink()
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    with pytest.raises(InvalidRecord, match="no chat template"):
        Version(folder).encode_chat([{"role": "user", "content": "x"}])
