/* The store of conversations, in IndexedDB. If the browser forbids it, they last only as long as the page, and `isLasting` is false. */

const NAME = "relaxserve", STORE = "conversations", VERSION = 1;

const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

export class Store {
  #database = null;

  get isLasting() {
    return this.#database !== null;
  }

  async open() {
    try {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, {keyPath: "id"});
      this.#database = await done(request);
    } catch {
      this.#database = null;
    }
  }

  async all() {
    return this.#database ? done(this.#objects("readonly").getAll()) : [];
  }

  async put(conversation) {
    if (this.#database) await done(this.#objects("readwrite").put(structuredClone(conversation)));
  }

  async remove(id) {
    if (this.#database) await done(this.#objects("readwrite").delete(id));
  }

  #objects(mode) {
    return this.#database.transaction(STORE, mode).objectStore(STORE);
  }
}
