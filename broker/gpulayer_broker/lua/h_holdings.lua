-- Shared: who holds what. held:<node> keeps the CPU and memory lots of each attempt, and beside them what is kept for a job that
-- waits (h_earmarks.lua), device:<uuid> the shares of a device (whichever node or worker offers it). What is free is computed in
-- the call from these, never stored.

-- a worker's offer, as claim and commit carry it:
-- worker, incarnation, max, nonce, lease_ms, disk_mib, n, then n times uuid, share, group, free_mib
function H.offer(A, i)
  local o = {worker = A[i], incarnation = A[i + 1], max = tonumber(A[i + 2]), nonce = A[i + 3],
             lease = tonumber(A[i + 4]), disk = tonumber(A[i + 5]), lots = {}}
  local k = i + 7
  for _ = 1, tonumber(A[i + 6]) do
    o.lots[#o.lots + 1] = {uuid = A[k], share = A[k + 1], group = A[k + 2], free = tonumber(A[k + 3])}
    k = k + 4
  end
  return o
end

-- free lots of devices: shares not held, with the memory that holders of other shares declared taken off
function H.free_lots(P, offered)
  local out, holders = {}, {}
  for _, lot in ipairs(offered) do
    local h = holders[lot.uuid]
    if not h then
      h = {taken = 0, shares = {}}
      local all = redis.call('HGETALL', P .. 'device:' .. lot.uuid)
      for i = 1, #all, 2 do
        h.shares[all[i]] = true
        h.taken = h.taken + tonumber(string.match(all[i + 1], ' (%d+)$'))
      end
      holders[lot.uuid] = h
    end
    if not h.shares[lot.share] then
      out[#out + 1] = {uuid = lot.uuid, share = lot.share, group = lot.group, free = lot.free - h.taken}
    end
  end
  return out
end

-- room of an offer: what this worker could still take, by its own slots and by its node
function H.room(P, o, w)
  local mine, cpus, memory, earmark = w.slots, w.cpus, w.memory, nil
  local held = redis.call('HVALS', P .. 'held:' .. w.node)
  for i = 1, #held do
    local who, c, m = string.match(held[i], '^(%S+) (%d+) (%d+)$')
    if who then
      cpus, memory = cpus - c, memory - m
      if who == o.worker then mine = mine - c end
    else
      earmark = H.earmark(held[i]) or H.fail(P .. 'held:' .. w.node, held[i])
    end
  end
  local room = {cpus = math.min(mine, cpus), memory = memory, disk = o.disk, lots = H.free_lots(P, o.lots)}
  if earmark then H.keep_room(room, earmark, o.worker, mine, cpus) end
  return room
end

function H.hold(P, o, w, room, need, lots, id, token)
  local ref, text = id .. '/' .. token, {}
  redis.call('HSET', P .. 'held:' .. w.node, ref, o.worker .. ' ' .. need.held)
  room.cpus, room.memory, room.disk = room.cpus - need.cpus, room.memory - need.memory, room.disk - need.disk
  for _, lot in ipairs(lots) do
    redis.call('HSET', P .. 'device:' .. lot.uuid, lot.share, ref .. ' ' .. need.vram)
    text[#text + 1] = lot.uuid .. '/' .. lot.share
    for k = #room.lots, 1, -1 do
      local other = room.lots[k]
      if other.uuid == lot.uuid then
        if other.share == lot.share then table.remove(room.lots, k) else other.free = other.free - need.vram end
      end
    end
  end
  return table.concat(text, ',')
end

-- frees what an attempt holds; true if others on the node could use it
function H.free(P, j, ref)
  H.belong(P .. 'running:' .. j.worker, j.id, false)
  H.place(P .. 'leases', j.id, nil)
  if j.ride ~= '' then
    if H.leave_ride(P, j) then return false end
    ref = j.ride
  end
  j.freed = true
  local lot = redis.call('HGET', P .. 'held:' .. j.node, ref)
  redis.call('HDEL', P .. 'held:' .. j.node, ref)
  for uuid, share in string.gmatch(j.lots, '([^,]+)/([^,/]+)') do redis.call('HDEL', P .. 'device:' .. uuid, share) end
  if redis.call('HINCRBY', P .. 'owners', j.owner, -1) <= 0 then redis.call('HDEL', P .. 'owners', j.owner) end
  return j.lots ~= '' or (lot and not string.find(lot, ' 0 0$'))
end
