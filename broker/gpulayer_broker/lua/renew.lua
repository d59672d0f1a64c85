-- renew: a worker's heartbeat: it lives, and these attempts of its are still running.
-- Guarantee: only listed attempts whose token is current are extended; attempts of this worker that it does not list, and
--   that were granted more than a heartbeat ago by a claim whose answer it knows, go back uncounted: what its answer is still
--   to bring it stays its own.
-- Keys: root. Arguments: worker, incarnation, lease_ms, n, then n times id, token, started (1 once the job itself runs),
--   progress ('' for none), then what status shows of the worker ('' where that has not changed), and the number of the last
--   claim whose answer it had when it made the list: what that claim's nonce begins with ('' where it has had all answers).
-- Returns: {'ok', {stale id, …}, {cancelled id, …}, keeper ('1' or '0'), state}, {'unknown'} or {'superseded'}.
local function started(P, j, now)
  redis.call('HSET', H.job(P, j.id), 'state', 'running', 'started_ms', now)
  H.index(P, j.id, 'scheduled', 'running', j.seq)
  H.event(P, j.id, 'running')
  j.state = 'running'
end
H.started = started

-- claims are numbered in their order; a token is `<attempt>:<nonce><n>`
local function is_known(token, known)
  return string.sub(string.match(token, ':(.*)') or '', 1, #known) <= known
end

local function unlisted(P, worker, listed, known, beat, now)
  for _, id in ipairs(redis.call('SRANDMEMBER', P .. 'running:' .. worker, 256)) do
    local j = not listed[id] and H.load(P, id)
    if j and H.holds(j, j.token) then
      if is_known(j.token, known) and tonumber(redis.call('HGET', H.job(P, id), 'granted_ms') or '0') < now - beat then
        H.end_or(P, j, now, function() H.again(P, j, 'retrying', now) end)
        H.poke(P, worker, now)
      end
    elseif not listed[id] then
      redis.call('SREM', P .. 'running:' .. worker, id)
    end
  end
end

-- one worker keeps the clock of the namespace: it ticks when something falls due
local function keeper(P, worker, beat)
  local who = redis.call('GET', P .. 'keeper')
  if who and who ~= worker then return '0' end
  redis.call('SET', P .. 'keeper', worker, 'PX', math.floor(1.5 * beat))
  return '1'
end

register('renew', {'allow-oom'}, function(K, A)
  local P, worker, now = K[1], A[1], H.now()
  local v = redis.call('HMGET', P .. 'worker:' .. worker, 'incarnation', 'heartbeat_ms', 'grace_ms', 'class', 'state')
  if v[1] ~= A[2] then return {v[1] and 'superseded' or 'unknown'} end
  if redis.call('HEXISTS', P .. 'classcaps', v[4]) == 0 then return {'unknown'} end
  local until_ms, beat = now + tonumber(A[3]) + tonumber(v[3]), tonumber(v[2])
  local stale, cancelled, listed = {}, {}, {}
  for i = 5, 4 + 4 * tonumber(A[4]), 4 do
    local id = A[i]
    local j = H.load(P, id)
    if H.holds(j, A[i + 1]) then
      listed[id] = true
      redis.call('ZADD', P .. 'leases', until_ms, id)
      if A[i + 2] == '1' and j.state == 'scheduled' then started(P, j, now) end
      if A[i + 3] ~= '' then redis.call('HSET', H.job(P, id), 'progress', A[i + 3]) end
      if j.cancel ~= '' then cancelled[#cancelled + 1] = id end
    else
      stale[#stale + 1] = id
    end
  end
  local info = A[5 + 4 * tonumber(A[4])]
  if info and info ~= '' then redis.call('HSET', P .. 'worker:' .. worker, 'info', info) end
  if not H.fresh(P, worker, now) then H.poke(P, worker, now) end  -- rings may have passed it by
  redis.call('ZADD', P .. 'workers', now, worker)
  redis.call('ZADD', P .. 'classseen', now, v[4])
  unlisted(P, worker, listed, A[6 + 4 * tonumber(A[4])] or '', beat, now)
  return {'ok', stale, cancelled, keeper(P, worker, beat), v[5]}
end)
