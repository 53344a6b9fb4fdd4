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
    return this.#database ? done(this.#database.transaction(STORE, "readonly").objectStore(STORE).getAll()) : [];
  }

  async put(conversation) {
    if (this.#database) await this.#change(objects => objects.put(structuredClone(conversation)));
  }

  async remove(id) {
    if (this.#database) await this.#change(objects => objects.delete(id));
  }

  /* Return when a change is stored. A browser may accept a request, and then have no room for its transaction. */
  #change(act) {
    const transaction = this.#database.transaction(STORE, "readwrite");
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error ?? new Error("the browser does not store it"));
      act(transaction.objectStore(STORE));
      transaction.commit();  // else the browser waits for this page to handle the answer, and undoes the change if the page has gone
    });
  }
}
